"""The flags for what a command shows to scrapers and probes."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated

import tyro

from dmoe_jax.metrics.monitor import Monitor, open_monitor
from dmoe_jax.runs.endings import UsageError
from dmoe_jax.runs.speech import say
from net.errors import ListenFailed
from net.identity import Address


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
                raise UsageError(f"--metrics-port: {error}") from error
            if monitor.address is not None:
                say(f"metrics at http://{monitor.address}/metrics")
            yield monitor
