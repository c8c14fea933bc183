"""Flags of a process's place in a swarm: its identity, addresses, memory and metrics. Nothing here imports JAX."""

import ipaddress
import os
import shlex
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Annotated

import tyro

from dmoe_jax.directory.grid import check_prefix
from dmoe_jax.machine.environment import SECRET_VARIABLE
from dmoe_jax.metrics.monitor import Monitor, open_monitor
from dmoe_jax.peers.joining import parse_targets
from dmoe_jax.peers.listed import NobodyListed, PeersFileError, peers_now
from dmoe_jax.peers.peer import PeerConfig, SwarmPeer, open_peer
from dmoe_jax.peers.security import Plain, Security, Tls
from dmoe_jax.runs.endings import CommandFailed, TryAgain, UsageError, mistakes_in_one_line
from dmoe_jax.runs.run_folder import replaced_file
from dmoe_jax.runs.speech import say
from dmoe_net.errors import ListenFailed
from dmoe_net.identity import Address
from dmoe_net.rpc.bulk import MemoryBudget
from dmoe_net.rpc.faults import FaultPlan
from dmoe_net.wire.messages import check_announced

JoinTexts = Annotated[tuple[str, ...], tyro.conf.arg(metavar="PEER [PEER ...]")]
"""Peers to join through, as the command line takes them."""

_EOF_TEXT = "End when standard input closes (set by a process that starts this one and may be killed)."

EndsWithInput = Annotated[bool, tyro.conf.arg(help=_EOF_TEXT)]
"""True if a command ends with the process that started it."""

_File = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkOptions:
    """Identity of this process, and its swarm. Links are encrypted, and both ends prove who they are."""

    identity: _File = None
    """This peer's private key; made if missing. One process at a time. Without it, a fresh identity each time."""
    swarm_secret_file: _File = None
    """The secret that all peers of the swarm share. Default: DMOE_SWARM_SECRET_FILE, else a swarm open to everybody."""
    allow_list: _File = None
    """The only peers to talk to, a peer id a line (see `dmoe identity`). Default: all who know the secret."""
    state_dir: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder in which this peer remembers its key (unless --identity names one) and the peers that it has met: started
    again it is the same peer, and finds its swarm though nobody named by --join is there."""
    insecure_loopback: bool = False
    """Plain TCP without encryption or proof, on this machine only. All peers of the swarm must use it."""

    @property
    def secret_file(self) -> Path | None:
        """File of the swarm's secret: the flag, else the environment; None for an open swarm."""
        named = os.environ.get(SECRET_VARIABLE)
        return self.swarm_secret_file or (Path(named) if named else None)

    def made_state_dir(self) -> Path | None:
        """The folder of --state-dir, made if it is missing. Raises UsageError if it cannot be."""
        if self.state_dir is None:
            return None
        try:
            self.state_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"--state-dir {self.state_dir}: {error.strerror}") from error
        return self.state_dir

    def security(self) -> Security:
        """Protection of links. Raises UsageError if plain TCP was asked for beside a protection."""
        if not self.insecure_loopback:
            key = None if self.state_dir is None else self.state_dir / "identity.pem"
            return Tls(identity=self.identity or key, secret=self.secret_file, allowed=self.allow_list)
        given = {
            "--identity": self.identity,
            "--swarm-secret-file": self.swarm_secret_file,
            "--allow-list": self.allow_list,
            f"{SECRET_VARIABLE}={self.secret_file}": self.secret_file if self.swarm_secret_file is None else None,
        }
        if idle := [name for name, file in given.items() if file is not None]:
            # Rather than ignored: somebody meant this machine's peers to be protected.
            raise UsageError(f"--insecure-loopback proves nothing: {' and '.join(idle)} would have no effect")
        return Plain()

    def flags_for_others(self) -> str:
        """Flags that the peers of the same swarm must give too, with a space before each word."""
        if self.insecure_loopback:
            return " --insecure-loopback"
        file = self.secret_file
        return "" if file is None else f" --swarm-secret-file {shlex.quote(os.path.abspath(file))}"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberOptions(NetworkOptions):
    """Identity of this process, and its swarm's name."""

    swarm: str = "dmoe"
    """Name under which members of the swarm find each other."""

    def __post_init__(self) -> None:
        try:
            check_prefix(self.swarm)
        except ValueError as error:
            raise ValueError(f"--swarm must be 1 to 64 letters, digits, '_' or '-', got {self.swarm!r}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetOptions:
    """Memory that averaging may take."""

    memory_budget: Annotated[str, tyro.conf.arg(metavar="SIZE")] = "512MiB"
    """Memory for averages and states under way in a process that averages, beyond the few MiB that each begins with:
    256MiB, 2GiB; at least 1MiB. With less than a long line wants, they take longer."""

    def __post_init__(self) -> None:
        try:
            MemoryBudget(self.memory_budget)
        except ValueError as error:
            raise ValueError(f"--memory-budget: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenOptions:
    """Address of a process that serves."""

    listen: Annotated[str, tyro.conf.arg(metavar="HOST:PORT")] = "127.0.0.1:0"
    """Address to listen on; port 0 lets the system choose. 0.0.0.0 is all of this machine's and needs --announce."""
    announce: Annotated[str | None, tyro.conf.arg(metavar="HOST")] = None
    """Name or address under which others reach this peer, if it is not the one to listen on."""
    write_contact: _File = None
    """File to write this peer's PEERID@HOST:PORT to when it has joined, for --join file:FILE of others. Several peers
    need several files."""

    def __post_init__(self) -> None:
        address = self.address
        if self.announce is not None:
            check_announced(self.announce, "--announce")
        elif _is_every_address(address.host):
            raise ValueError(
                f"--listen {self.listen} is every address of this machine: --announce must say under which name or "
                "address others reach it"
            )

    @property
    def address(self) -> Address:
        """Address to listen at."""
        return Address.parse(self.listen)


def _is_every_address(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsOptions:
    """Metrics of a process."""

    metrics_port: Annotated[int | None, tyro.conf.arg(metavar="PORT")] = None
    """Serve /metrics for Prometheus, /healthz and /readyz at this port; 0 lets the system choose one, which is printed.
    Default: nowhere."""
    metrics_host: Annotated[str, tyro.conf.arg(metavar="HOST")] = "127.0.0.1"
    """Address to serve them at. Whoever reaches it reads them: nothing asks who it is."""

    def __post_init__(self) -> None:
        if self.metrics_port is None and self.metrics_host != "127.0.0.1":
            raise ValueError("--metrics-host would have no effect without --metrics-port")
        if self.metrics_port is not None and not 0 <= self.metrics_port <= 65535:
            raise ValueError(f"--metrics-port must be 0 to 65535, got {self.metrics_port}")
        if not self.metrics_host:
            raise ValueError("--metrics-host must not be empty")

    @asynccontextmanager
    async def opened(
        self, command: str, more: Mapping[str, Callable[[], bytes]] = MappingProxyType({})
    ) -> AsyncIterator[Monitor]:
        """Open the process's monitor, as `open_monitor`. Raises UsageError if there is no such host or port to have."""
        address = None if self.metrics_port is None else Address(self.metrics_host, self.metrics_port)
        async with AsyncExitStack() as stack:
            try:
                monitor = await stack.enter_async_context(open_monitor(address, command=command, more=more))
            except ListenFailed as error:
                raise not_listening("--metrics-port", error) from error
            if monitor.address is not None:
                say(f"metrics at http://{monitor.address}/metrics")
            yield monitor


def not_listening(flag: str, error: ListenFailed) -> UsageError:
    """The error of a command whose flag names an address that it cannot have; one that is taken may be free later."""
    return (TryAgain if error.is_taken else UsageError)(f"{flag}: {error}")


def check_join(join: Sequence[str]) -> None:
    """Raise `UsageError` naming the text that is no peer to join through, nor a file of such peers that is there."""
    with mistakes_in_one_line("--join"), suppress(NobodyListed):
        peers_now(parse_targets(tuple(join)))


@asynccontextmanager
async def join_swarm(
    network: NetworkOptions,
    *,
    join: Sequence[str],
    listen: ListenOptions | None = None,
    faults: FaultPlan | None = None,
    budget: BudgetOptions | None = None,
) -> AsyncIterator[SwarmPeer]:
    """Open a peer as the flags say: without `listen` in client mode, without `join` in a new swarm. Raises UsageError
    if a file of peers is none, or the contact cannot be written; NetError as `open_peer`."""
    config = PeerConfig(
        listen=None if listen is None else listen.address,
        announce=None if listen is None else listen.announce,
        security=network.security(),
        state_dir=network.made_state_dir(),
        faults=faults,
        memory_budget=None if budget is None else budget.memory_budget,
    )
    async with AsyncExitStack() as stack:
        try:
            peer = await stack.enter_async_context(open_peer(tuple(join), config))
        except PeersFileError as error:
            raise UsageError(f"--join: {error}") from error
        if listen is not None and (path := listen.write_contact) is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with replaced_file(path) as temporary:
                    temporary.write_text(f"{peer.contact}\n")
            except OSError as error:
                raise CommandFailed(f"--write-contact {path}: {error.strerror}") from error
        yield peer


def join_line(command: str, network: NetworkOptions, peer: SwarmPeer) -> str:
    """Line to paste on another terminal, or another machine, to join through this peer."""
    return f"Join it with:  dmoe {command} --join {peer.contact}{network.flags_for_others()}"
