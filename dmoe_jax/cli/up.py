"""`dmoe up`: a whole swarm on this machine, in one terminal."""

import shlex
import time
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.common import UsageError
from dmoe_jax.cli.lifecycle import EXIT_INTERRUPTED, Stop, run_until_done
from dmoe_jax.cli.local_training import (
    LEAVE_TIMEOUT_S,
    LocalPlan,
    LocalTraining,
    check_out,
    network_flags,
    open_local_training,
)
from dmoe_jax.cli.network import ListenOptions, NetworkOptions
from dmoe_jax.grid import ExpertUid, all_uids, expand_grid_pattern, layer_prefix
from dmoe_jax.layer_config import LayerConfig
from dmoe_jax.processes import averaging_flags, deal


@dataclass(frozen=True, kw_only=True)
class UpCommand:
    """Run a whole swarm on this machine: a DHT peer, expert nodes and trainer processes, until training is done.

    Others join it through the line that it prints. Ctrl-C ends all processes in order, a second one at once.
    """

    nodes: int = 2
    """Expert node processes; the experts are dealt out among them."""
    trainers: int = 1
    """Trainer processes, whose trunks are averaged; with 0 the nodes serve until Ctrl-C."""
    out: Path | None = None
    """Run folder of the first trainer process; new or empty. The others' and the logs lie beside it. Default: runs/up
    and the time."""
    num_layers: int = 2
    """Expert layers, called layer0, layer1 and so on."""
    grid_size: tuple[int, ...] = (4, 4)
    """Extents of each layer's expert grid."""
    experts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN [PATTERN ...]")] = ()
    """Experts to serve instead of those layers, for a model of your own: patterns such as ffn.[0:4].[0:4]."""
    kind: Annotated[str, tyro.conf.arg(name="expert")] = "transformer_xl"
    """What an expert is; as for `dmoe node`, also my_file.py:my_expert."""
    optimizer: str = ""
    """What experts learn with; as for `dmoe node`, my_file.py:my_optimizer. Default: Adam."""
    model: str = ""
    """What to train; as for `dmoe train`, my_file.py:my_model. Default: a Transformer-XL language model."""
    expert: Annotated[LayerConfig, tyro.conf.arg(name="")] = field(default_factory=LayerConfig)
    """Shape of one expert."""
    data: str = "auto"
    """Corpus; as for `dmoe train`."""
    router: str = "product_key"
    """Chooses the experts of each sample; as for `dmoe train`."""
    steps: int = 600
    """Trunk updates of each trainer process."""
    max_minutes: float = 0.0
    """Stop training after this many minutes even if there are steps left; 0 for no limit."""
    average_every: int = 10
    """Trunk updates of a process between two averages, if there are several."""
    seed: int = 0
    """Seed of all parameters; each trainer process reads its own text."""
    node_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """Further flags of every node in one word, such as "--warmup-steps 50 --checkpoint-period-s 30"."""
    train_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """Further flags of every trainer process in one word, such as "--num-trainers 2 --k-best 2"."""
    announce: Annotated[str | None, tyro.conf.arg(metavar="HOST")] = None
    """Name or address of this machine, for others to join from elsewhere. Default: this machine only."""
    swarm_secret_file: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """The secret that all peers of the swarm share. Default: DMOE_SWARM_SECRET_FILE, else a swarm open to everybody."""
    insecure_loopback: bool = False
    """Plain TCP without encryption or proof, on this machine only."""
    exit_on_stdin_eof: bool = False
    """End when standard input closes (set by a process that starts this one and may be killed)."""

    def run(self) -> int:
        """Run the swarm; the exit status."""
        plan = self.plan()
        return run_until_done(
            lambda stop: self._train(plan, stop),
            exit_on_stdin_eof=self.exit_on_stdin_eof,
            leave_timeout_s=LEAVE_TIMEOUT_S,
        )

    async def _train(self, plan: LocalPlan, stop: Stop) -> int:
        console = Console(soft_wrap=True, highlight=False)
        console.print(f"run folder: {plan.out}; logs of the processes: {plan.logs}")
        async with open_local_training(plan, console) as local:
            others = " ".join(plan.network_flags)
            console.print(f"Join it with:  dmoe train --join {local.dht.contact} {others}".rstrip())
            with stop.body() as body:
                await self._trained(local)
            if body.cancelled_caught:
                console.print("ending all processes in order; Ctrl-C again ends them at once")
        return EXIT_INTERRUPTED if body.cancelled_caught else 0

    async def _trained(self, local: LocalTraining) -> None:
        await local.trained()
        if not local.trainers:
            await trio.sleep_forever()

    def plan(self) -> LocalPlan:
        """What is to run.

        Raises:
          UsageError: a flag that cannot be meant.
        """
        for name, least in (("nodes", 1), ("trainers", 0), ("steps", 1), ("average_every", 1), ("num_layers", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"--{name.replace('_', '-')} must be at least {least}, got {getattr(self, name)}")
        if not self.grid_size or min(self.grid_size) < 1:
            raise UsageError(f"--grid-size must be positive integers, got {self.grid_size}")
        hands = deal(self._uids(), self.nodes)
        if not all(hands):
            raise UsageError(f"--nodes {self.nodes} is more than there are experts: {sum(map(len, hands))}")
        network = NetworkOptions(swarm_secret_file=self.swarm_secret_file, insecure_loopback=self.insecure_loopback)
        node_flags, train_flags = self._words("node_flags"), self._words("train_flags")
        return LocalPlan(
            hands=hands,
            node_flags=[*self._flags_of_nodes(), *node_flags],
            trainer_flags=lambda index: [*self._flags_of_trainer(index), *train_flags],
            num_trainers=self.trainers,
            num_steps=self.steps,
            out=check_out(self.out or Path("runs") / time.strftime("up-%Y%m%d-%H%M%S")),
            listen_flags=self._listen_flags(),
            network_flags=network_flags(secret_file=network.secret_file, insecure_loopback=self.insecure_loopback),
        )

    def _uids(self) -> list[ExpertUid]:
        if not self.experts:
            return [uid for layer in range(self.num_layers) for uid in all_uids(layer_prefix(layer), self.grid_size)]
        try:
            return list(dict.fromkeys(uid for pattern in self.experts for uid in expand_grid_pattern(pattern)))
        except ValueError as error:
            raise UsageError(f"--experts: {error}") from error

    def _words(self, name: str) -> list[str]:
        try:
            return shlex.split(getattr(self, name))
        except ValueError as error:
            raise UsageError(f"--{name.replace('_', '-')}: {error}, got {getattr(self, name)!r}") from error

    def _listen_flags(self) -> list[str]:
        if self.announce is None:
            return []
        try:
            ListenOptions(listen="0.0.0.0:0", announce=self.announce)
        except ValueError as error:
            raise UsageError(str(error)) from error
        return ["--listen", "0.0.0.0:0", "--announce", self.announce]

    def _flags_of_nodes(self) -> list[str]:
        kind = [] if self.kind == "transformer_xl" else ["--expert", self.kind]
        optimizer = ["--optimizer", self.optimizer] if self.optimizer else []
        return [*kind, *optimizer, *self._shape(), "--seed", str(self.seed), "--announce-period-s", "5"]

    def _flags_of_trainer(self, index: int) -> list[str]:
        averages = averaging_flags(num_processes=self.trainers, every=self.average_every, seed=self.seed, index=index)
        model = ["--model", self.model] if self.model else ["--num-layers", str(self.num_layers)]
        return [
            *("--data", self.data, "--router", self.router, "--steps", str(self.steps)),
            *("--max-minutes", str(self.max_minutes), "--grid-size", *map(str, self.grid_size)),
            *model,
            *self._shape(),
            *averages,
            *(self._listen_flags() if self.trainers > 1 else []),
        ]

    def _shape(self) -> list[str]:
        """The flags of an expert's shape that differ from the defaults."""
        return [
            word
            for each in fields(self.expert)
            if (value := getattr(self.expert, each.name)) != each.default
            for word in ("--" + each.name.replace("_", "-"), str(value))
        ]
