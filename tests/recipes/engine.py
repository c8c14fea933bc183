"""A small container engine on loopback: the containers of a recipe as processes, each with an address of its own.

A container's folders are folders below one of the engine, and its names lead to its address, as the engine's DNS would
have it; nothing else of its command line and environment is touched.
"""

import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.recipes.containers import SECRET, Container

_NAMES = '''\
"""The engine's DNS: names of containers, read anew at each question; no other name leads anywhere."""
import ipaddress, os, socket
_asked = socket.getaddrinfo
def getaddrinfo(host, *args, **kwargs):
    name = host.decode() if isinstance(host, bytes) else host
    with open(os.environ["ENGINE_HOSTS"]) as file:
        hosts = dict(line.split() for line in file)
    try:
        name is None or ipaddress.ip_address(hosts.get(name, name))
    except ValueError:
        raise socket.gaierror(socket.EAI_NONAME, f"no container is called {name}") from None
    return _asked(hosts.get(name, name), *args, **kwargs)
socket.getaddrinfo = getaddrinfo
'''

_KEPT = ("PATH", "PYTHONPATH", "JAX_PLATFORMS", "JAX_DISABLE_MOST_OPTIMIZATIONS", "XLA_FLAGS", "NPROC", "LANG")
"""Variables of this process that containers have too: the tests' Python, and what makes it quick."""


class Engine:
    """Starts and stops containers. Made by `open_engine`."""

    def __init__(self, folder: Path, stack: ExitStack, env: Mapping[str, str]) -> None:
        self._folder, self._stack, self._env = folder, stack, dict(env)
        self.volumes = folder / "volumes"
        """Folder of all volumes, by their names."""
        self._hosts = folder / "hosts"
        self._hosts.write_text("localhost 127.0.0.1\n")
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, containers: Iterable[Container], command: Sequence[str] = ()) -> None:
        """Start containers, which may have been there before; with another command where one is given."""
        for each in containers:
            names = "".join(f"{name} {each.ip}\n" for name in each.names)
            with self._hosts.open("a") as file:
                file.write(names)
            log = self._stack.enter_context(self.log_of(each).open("a"))
            self.processes[each.name] = subprocess.Popen(
                [self.seen_outside(each, word) for word in command or each.argv],
                env=self.environment(each),
                cwd=self._made(each),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,  # a signal reaches all that a container's shell has started
            )

    def stop(self, container: Container) -> tuple[int, float]:
        """Send SIGTERM; the exit status and the seconds that it took. Kills after the container's grace."""
        process, began = self.processes[container.name], time.monotonic()
        os.killpg(process.pid, signal.SIGTERM)
        try:
            status = process.wait(container.grace_s)
        finally:
            self._kill(process)
        return status, time.monotonic() - began

    def wait_ready(self, containers: Iterable[Container], *, within_s: float = 240) -> None:
        """Return when the probe of each says that it is ready."""
        for each in containers:
            self.until(lambda each=each: self._is_ready(each), each, within_s=within_s)

    def until(self, is_so: Callable[[], bool], container: Container, *, within_s: float = 120) -> None:
        """Return when something is so; fail with the container's log if it has ended before, or after the time."""
        deadline = time.monotonic() + within_s
        while not is_so():
            has_ended = self.processes[container.name].poll() is not None
            if has_ended or time.monotonic() > deadline:
                raise AssertionError(f"{container.name}: {self.log_of(container).read_text()[-3000:]}")
            time.sleep(0.2)

    def metrics(self, container: Container, name: str) -> dict[str, float]:
        """Values of a family of metrics, by what stands in braces behind its name.

        A trainer does not answer while it compiles.
        """
        with urllib.request.urlopen(f"http://{container.ip}:9100/metrics", timeout=60) as answer:
            text = answer.read().decode()
        found = re.findall(rf"^{name}(?:\{{(.*)\}})? (\S+)$", text, re.MULTILINE)
        return {labels: float(value) for labels, value in found}

    def log_of(self, container: Container) -> Path:
        """File with all that a container has printed."""
        return self._folder / f"{container.name}.log"

    def outside(self, container: Container, path: str) -> Path:
        """Place of a container's path on this machine."""
        return Path(self.seen_outside(container, path))

    def seen_outside(self, container: Container, text: str) -> str:
        """Text with the container's folders and addresses as they are on this machine."""
        for path, volume in container.volumes.items():
            text = re.sub(rf"(?<![\w./-]){re.escape(path)}(?![\w.-])", str(self.volumes / volume), text)
        return re.sub(r"(?<![\d.])(0\.0\.0\.0|127\.0\.0\.1)(?![\d.])", container.ip, text)

    def environment(self, container: Container) -> dict[str, str]:
        """A container's variables, in their place those of the engine's caller."""
        env = {name: os.environ[name] for name in _KEPT if name in os.environ}
        env |= {"ENGINE_HOSTS": str(self._hosts), "PYTHONUNBUFFERED": "1"}
        env["PATH"] = f"{self._folder / 'bin'}:{env['PATH']}"
        env["PYTHONPATH"] = f"{self._folder / 'bin'}:{env.get('PYTHONPATH', '')}"
        own = {"DMOE_METRICS_HOST": "127.0.0.1"} | dict(container.env)  # each container has a loopback of its own
        return env | {name: self.seen_outside(container, value) for name, value in own.items()} | self._env

    def _made(self, container: Container) -> Path:
        """Make the container's folders and the files of its secrets; return where its process begins."""
        for volume in container.volumes.values():
            (self.volumes / volume).mkdir(parents=True, exist_ok=True)
        for path in container.secrets:
            file = self.outside(container, path)
            if not file.exists():  # a file behind a link, as the kubelet makes it
                (data := file.parent / "..data").mkdir()
                (data / file.name).touch(0o600)
                (data / file.name).write_text(SECRET)
                (data / file.name).chmod(0o400)
                file.symlink_to(data / file.name)
        return self.volumes

    def _is_ready(self, container: Container) -> bool:
        probe = container.ready
        if probe.command:
            words = [self.seen_outside(container, word) for word in probe.command]
            return subprocess.run(words, env=self.environment(container), capture_output=True).returncode == 0
        try:
            with urllib.request.urlopen(f"http://{container.ip}:{probe.port}{probe.path}", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:  # nobody listens yet, or the status is another one
            return False

    def _kill(self, process: subprocess.Popen[str]) -> None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def kill_all(self) -> None:
        """Kill what still runs."""
        for process in self.processes.values():
            self._kill(process)


@contextmanager
def open_engine(folder: Path, env: Mapping[str, str] | None = None, *, dmoe: str = "") -> Iterator[Engine]:
    """An engine whose containers end with the block.

    Args:
      folder: for volumes, secrets and logs.
      env: variables that stand in the place of the recipe's.
      dmoe: script that is the `dmoe` command in the place of this clone's.
    """
    (folder / "bin").mkdir()
    command = f'exec {sys.executable} -m dmoe_jax.cli "$@"\n'
    for name, script in {"dmoe": dmoe or command, "python": f'exec {sys.executable} "$@"\n'}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{script}")
        (folder / "bin" / name).chmod(0o755)
    (folder / "bin" / "sitecustomize.py").write_text(_NAMES)
    with ExitStack() as stack:
        engine = Engine(folder, stack, env or {})
        stack.callback(engine.kill_all)
        yield engine
