"""A Slurm cluster of this machine alone, for tests: one slurmctld, two slurmd and a munged, all below one folder.

It needs root, as `slurmd` does, and Debian's `slurm-wlm` and `munge`. Nothing of the machine's own Slurm is read or
written. Each node claims to have 16 cores, so that a swarm fits.
"""

import contextlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
NODES = ("n1", "n2")

_READY_S = 60.0
_SBIN = "/usr/sbin"  # not on the PATH of everybody

_CONF = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
# A job that is requeued waits until its old credential has expired: 120 s by default.
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
SchedulerParameters=sched_interval=2,sched_min_interval=100000,bf_interval=2
ReturnToService=2
JobRequeue=1
KillWait={kill_wait_s}
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={first} CPUs=16 RealMemory=1000
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={second} CPUs=16 RealMemory=1000
PartitionName=main Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:8
"""


def why_no_cluster() -> str:
    """Why this machine can have no cluster; "" if it can."""
    missing = [name for name in DAEMONS if shutil.which(name, path=_path()) is None]
    if missing:
        return f"without {', '.join(missing)}: apt-get install slurm-wlm munge"
    return "" if os.geteuid() == 0 else "slurmd needs root"


@contextlib.contextmanager
def open_cluster(folder: Path, *, kill_wait_s: int = 20) -> Iterator[dict[str, str]]:
    """Run a cluster of two nodes until the block ends; its jobs are killed then.

    Args:
      folder: empty folder for everything that it writes, with a short path: its socket's has at most 107 characters.
      kill_wait_s: seconds between SIGTERM and SIGKILL of a job that is cancelled or over its time.

    Yields: environment for `sbatch`, `squeue`, `scontrol` and so on, and for submitit; jobs of `sbatch` inherit it.
    """
    names = ("controller", "first", "second")
    ports = dict(zip(names, _free_ports(len(names)), strict=True))
    host = socket.gethostname().partition(".")[0]
    environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
    for part in ("state", *(f"spool.{node}" for node in NODES)):
        (folder / part).mkdir()
    (folder / "slurm.conf").write_text(_CONF.format(folder=folder, host=host, kill_wait_s=kill_wait_s, **ports))
    # Systemd, which is not asked for a scope, need not be there.
    (folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nIgnoreSystemd=yes\n")
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        daemons.append(_start(_munged(folder), environment, folder))
        _wait_until(lambda: (folder / "munge.socket").exists(), "munged", folder)
        daemons.append(_start(("slurmctld", "-D"), environment, folder))
        daemons.extend(_start(("slurmd", "-D", "-N", node), environment, folder) for node in NODES)
        _wait_until(lambda: _are_idle(environment), "the nodes", folder)
        yield environment
    finally:
        if len(daemons) > 1:
            _cancel_all(environment)
        for daemon in reversed(daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(timeout=10)
            daemon.kill()
            daemon.wait()


def asked(environment: Mapping[str, str], *words: str) -> str:
    """Standard output of one of Slurm's commands. Raises RuntimeError with what it said if it fails."""
    done = subprocess.run(words, env=dict(environment), capture_output=True, text=True, timeout=60, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(words)}: {done.stderr.strip() or done.stdout.strip()}")
    return done.stdout.strip()


def _path() -> str:
    return os.pathsep.join([os.environ.get("PATH", os.defpath), _SBIN])


def _munged(folder: Path) -> Sequence[str]:
    key = folder / "munge.key"
    key.write_bytes(secrets.token_bytes(128))
    key.chmod(0o600)
    files = {"key-file": "key", "socket": "socket", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    # Forced, since the folder of a test is often below one that others may write to.
    return ("munged", "--foreground", "--force", *(f"--{flag}={folder}/munge.{end}" for flag, end in files.items()))


def _start(words: Sequence[str], environment: Mapping[str, str], folder: Path) -> subprocess.Popen[bytes]:
    # What it says before its log is open; both slurmd add to one file.
    with (folder / f"{words[0]}.out").open("ab") as output:
        return subprocess.Popen(words, env=dict(environment), stdin=subprocess.DEVNULL, stdout=output, stderr=output)


def _are_idle(environment: Mapping[str, str]) -> bool:
    try:
        states = asked(environment, "sinfo", "-h", "-N", "-o", "%T").split()  # a line for each partition
    except RuntimeError:  # the controller does not answer yet
        return False
    return set(states) == {"idle"}


def _cancel_all(environment: Mapping[str, str]) -> None:
    """Kill every job, and wait until all are gone: a slurmd that ends leaves the processes of its jobs."""
    failures = (RuntimeError, subprocess.TimeoutExpired)  # a job that ends just now is an error, too
    for words in (("--full", "--signal=KILL"), ()):
        with contextlib.suppress(*failures):
            asked(environment, "scancel", "--user=root", *words)
    deadline = time.monotonic() + _READY_S
    with contextlib.suppress(*failures):
        while asked(environment, "squeue", "-h") and time.monotonic() < deadline:
            time.sleep(0.2)


def _wait_until(is_so: Callable[[], bool], what: str, folder: Path) -> None:
    deadline = time.monotonic() + _READY_S
    while not is_so():
        if time.monotonic() > deadline:
            logs = [path for pattern in ("*.log", "*.out") for path in sorted(folder.glob(pattern))]
            ends = "\n".join(f"{path.name}: {path.read_text(errors='replace')[-500:]}" for path in logs)
            raise RuntimeError(f"{what} did not come up within {_READY_S:g} s\n{ends}")
        time.sleep(0.1)


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]
