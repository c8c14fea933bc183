"""`dmoe dht`: a peer that keeps records and lets others in."""

from dataclasses import dataclass

import trio

from dmoe_jax.cli.common import join_swarm
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop, run_until_done


@dataclass(frozen=True, kw_only=True)
class DhtCommand:
    """Run a DHT peer: the meeting point of a swarm. Nodes and trainers join through it or through each other."""

    listen: str = "127.0.0.1:0"
    """Address to listen on, as HOST:PORT; port 0 lets the system choose. Plain TCP listens on loopback only."""
    join: tuple[str, ...] = ()
    """Addresses of peers to join through, each as HOST:PORT. None starts a new swarm."""
    exit_on_stdin_eof: bool = False
    """End when standard input closes (set by a process that starts this one and may be killed)."""

    def run(self) -> int:
        """Serve until interrupted; the exit status."""
        return run_until_done(self._serve, exit_on_stdin_eof=self.exit_on_stdin_eof)

    async def _serve(self, stop: Stop) -> int:
        async with join_swarm(listen=self.listen, join=self.join) as peer:
            print(f"DHT peer {peer.rpc.peer_id.short} listens on {peer.rpc.address}")
            print(f"Join it with:  dmoe node --join {peer.rpc.address}", flush=True)
            with stop.body():
                await trio.sleep_forever()
        return EXIT_INTERRUPTED
