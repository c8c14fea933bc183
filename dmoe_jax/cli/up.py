"""`dmoe up`: a whole swarm on this machine, in one terminal."""

import json
import shlex
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any

import trio
import tyro
from rich.console import Console

from dmoe_jax.cli.checks import check_at_least, check_no_effect
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.local_view import LocalView, TrainerWatch, show_headline
from dmoe_jax.cli.network import BudgetOptions, EndsWithInput, ListenOptions, MetricsOptions, NetworkOptions
from dmoe_jax.cli.sources import ConfigFile, Given
from dmoe_jax.cli.train_options import DataOptions, FolderOptions, LanguageModelOptions, RunOptions, TrunkRecipe
from dmoe_jax.cli.up_checks import check_file, check_init, check_trainer
from dmoe_jax.directory.grid import ExpertUid, expand_grid_pattern, layer_prefix
from dmoe_jax.machine.disk import FolderInUse, check_local, hold_folder, url_of
from dmoe_jax.machine.xla_threads import share_of_threads
from dmoe_jax.runs.command_line import parse_command_line
from dmoe_jax.runs.endings import EXIT_INTERRUPTED, CommandFailed, UsageError, mistakes_in_one_line
from dmoe_jax.runs.flags import as_flags, as_words, flag_of, flags_of, named_flags, words_of
from dmoe_jax.runs.processes import LocalSwarm, ProcessFailed, check_status, deal, open_local_swarm
from dmoe_jax.runs.run_folder import CONFIG, replaced_file
from dmoe_jax.trained.saved_run import SHARED_FOLDER, UP_FLAGS, saved_experts, trainer_folder, up_logs

LEAVE_TIMEOUT_S = 90.0
"""Seconds for all processes to end in order: trainers write their reports, nodes their checkpoints."""

_OF_THIS_PROCESS = ("--out", "--resume", "--trust-run", "--config", "--exit-on-stdin-eof")
"""Flags that a resumed run does not take from the one before."""

Beside = Callable[[LocalSwarm, Mapping[str, TrainerWatch]], Awaitable[None]]
"""Function of the swarm and of the progress of each trainer process, by its name."""


@dataclass(frozen=True, kw_only=True)
class LocalSwarmOptions:
    """Processes of the swarm, and their flags."""

    nodes: int = 2
    """Expert node processes; the experts are dealt out among them."""
    claim: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Deal out nothing: each node claims up to so many of the experts, and takes over those of a node that dies, as
    they were last saved; with --no-save-experts they begin again from their seeds."""
    trainers: int = 1
    """Trainer processes, whose trunks are averaged; with 0 the nodes serve until Ctrl-C."""
    save_experts: bool = True
    """With --no-save-experts the nodes do not save their experts. By default they do, every minute and at their end, in
    FOLDER.nodes beside the run folder, where --resume and dmoe inspect find them."""
    node_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """Further flags of every node in one word: --node-flags="--warmup-steps 50 --checkpoint-period-s 30"."""
    train_flags: Annotated[str, tyro.conf.arg(metavar="FLAGS")] = ""
    """Further flags of every trainer process in one word: --train-flags="--k-best 2 --timeout-s 5"."""


@dataclass(frozen=True, kw_only=True)
class OwnCodeOptions:
    """Experts, model and optimisers, if they are not the Transformer-XL under Adam."""

    experts: Annotated[tuple[str, ...], tyro.conf.arg(metavar="PATTERN [PATTERN ...]")] = ()
    """Experts to serve instead of those layers, for a model of your own: patterns such as ffn.[0:4].[0:4]."""
    kind: Annotated[str, tyro.conf.arg(name="expert")] = "transformer_xl"
    """Kind of an expert; as for `dmoe node`, also my_file.py:my_expert."""
    optimizer: str = ""
    """Optimiser of the experts; as for `dmoe node`, my_file.py:my_optimizer. Default: Adam."""
    model: str = ""
    """Model to train; as for `dmoe train`, my_file.py:my_model. Default: a Transformer-XL language model."""
    trunk_optimizer: str = ""
    """Optimiser of the trunks; as --optimizer of `dmoe train`, my_file.py:my_optimizer. Default: Adam, with the step
    size and so on given here."""


@named_flags("swarm_secret_file", "insecure_loopback", "announce")
@dataclass(frozen=True, kw_only=True)
class LocalNetworkOptions(NetworkOptions):
    """Network of the swarm's processes."""

    announce: Annotated[str | None, tyro.conf.arg(metavar="HOST")] = None
    """Name or address of this machine, for others to join from elsewhere. Default: this machine only."""


@dataclass(frozen=True, kw_only=True)
class UpCommand:
    """Run a whole swarm on this machine: a DHT peer, expert nodes and trainer processes, until training is done.

    Others join it through the line that it prints. Ctrl-C ends all processes in order, a second one at once.
    """

    swarm: Annotated[LocalSwarmOptions, tyro.conf.arg(name="")] = field(default_factory=LocalSwarmOptions)
    folder: Annotated[FolderOptions, tyro.conf.arg(name="")] = field(default_factory=FolderOptions)
    code: Annotated[OwnCodeOptions, tyro.conf.arg(name="")] = field(default_factory=OwnCodeOptions)
    language: Annotated[LanguageModelOptions, tyro.conf.arg(name="")] = field(default_factory=LanguageModelOptions)
    data: Annotated[DataOptions, tyro.conf.arg(name="")] = field(default_factory=DataOptions)
    adam: Annotated[TrunkRecipe, tyro.conf.arg(name="")] = field(default_factory=TrunkRecipe)
    run_length: Annotated[RunOptions, tyro.conf.arg(name="")] = field(default_factory=RunOptions)
    average_every: int = 10
    """Trunk updates of a process between two averages, if there are several."""
    budget: Annotated[BudgetOptions, tyro.conf.arg(name="")] = field(default_factory=BudgetOptions)
    network: Annotated[LocalNetworkOptions, tyro.conf.arg(name="")] = field(default_factory=LocalNetworkOptions)
    metrics: Annotated[MetricsOptions, tyro.conf.arg(name="")] = field(default_factory=MetricsOptions)
    """Address at which this process shows the others. Each of them then has a port of its own, and /targets lists these
    for Prometheus' http_sd_configs."""
    config: ConfigFile = None
    exit_on_stdin_eof: EndsWithInput = False

    def run(self) -> int:
        self.check()
        console = Console(soft_wrap=True, highlight=False)

        async def invite(swarm: LocalSwarm, watches: Mapping[str, TrainerWatch]) -> None:
            del watches
            contact, flags = swarm.processes[0].contact, self.network.flags_for_others()
            console.print(f"Join it with:  dmoe train --join {contact}{flags}")

        async def train(stop: Stop) -> int:
            status = await self.train(console, stop, invite)
            if status == EXIT_INTERRUPTED:
                console.print(f"go on with: {self.to_go_on()}")
            elif self.folders():
                show_headline(console, self.out, title=self.code.model or "DMoE Transformer-XL")
            return status

        return run_until_done(train, exit_on_stdin_eof=self.exit_on_stdin_eof, leave_timeout_s=LEAVE_TIMEOUT_S)

    def resumed(self, given: Given) -> "UpCommand":
        """The command as it goes on with a run: the run's flags, and those that were given. Raises UsageError if --out
        is no run, or its flags name Python files that the user does not."""
        if not self.folder.resume:
            return self
        if self.folder.out is None:
            raise UsageError("--resume needs --out: without the run's folder dmoe up cannot go on with it")
        try:
            saved = [str(word) for word in json.loads(self._flags_file.read_text())]
        except (OSError, ValueError) as error:
            line = f"--resume: {self.folder.out} is no run of dmoe up: cannot read {self._flags_file}"
            raise UsageError(line) from error
        resumed = given.resumed(UpCommand, saved, self.folder.out, prog="dmoe up", is_trusted=self.folder.trust_run)
        before, now = parse_command_line(UpCommand, prog="dmoe up", args=saved).swarm, resumed.swarm
        if now.nodes != before.nodes and now.claim is None and now.save_experts:
            raise UsageError(f"--nodes must be {before.nodes} as before: each node has saved experts of its own")
        if now.trainers and before.trainers and (now.trainers > 1) != (before.trainers > 1):
            expected = "1" if before.trainers == 1 else "at least 2"
            raise UsageError(f"--trainers must be {expected} as before: a lone trainer keeps no state of averaging")
        return resumed

    def to_go_on(self) -> str:
        """The command line that goes on with the run."""
        trust = " --trust-run" if ".py:" in " ".join(words_of(self)) else ""
        return f"dmoe up --resume --out {shlex.quote(str(self.out))}{trust}"

    @property
    def _logs(self) -> Path:
        return up_logs(self.out)

    @property
    def _flags_file(self) -> Path:
        """File of the command's flags."""
        return self._logs / UP_FLAGS

    @contextmanager
    def _logs_held(self) -> Iterator[None]:
        """Hold the folder for the logs, with the flags in it, while the block lasts. If a process refuses the flags,
        the folder has the earlier ones again: the run still goes on with them."""
        with ExitStack() as stack:
            try:
                stack.enter_context(hold_folder(self._logs, "swarm"))
                before = self._flags_file.read_text() if self._flags_file.exists() else None
                self._keep_flags(json.dumps(words_of(self, without=_OF_THIS_PROCESS)))
            except FolderInUse:
                raise
            except OSError as error:
                raise CommandFailed(f"--out: cannot make {self._logs}: {error.strerror}") from error
            try:
                yield
            except BaseException as error:
                refused = BaseExceptionGroup("", [error]).subgroup(
                    lambda each: isinstance(each, ProcessFailed) and each.status == UsageError.status
                )
                if refused is not None and before is not None:
                    self._keep_flags(before)
                raise

    def _keep_flags(self, text: str) -> None:
        with replaced_file(self._flags_file) as temporary:
            temporary.write_text(text)

    async def train(self, console: Console, stop: Stop, beside: Beside) -> int:
        """Run the swarm until the trainer processes are done or the command is stopped, and show it; the exit status.
        `beside` runs beside the training, and is cancelled at its end.

        Raises:
          ProcessFailed: a trainer ended with an error of its own, or another process before it served.
          CommandFailed: the folder for the logs cannot be made. FolderInUse: another swarm runs in it.
        """
        with self._logs_held():
            flags = shlex.split(self.network.flags_for_others())
            if self.metrics.metrics_port is not None:  # each has its own, at a port that the system chooses
                flags += as_flags({"metrics_port": 0, "metrics_host": self.metrics.metrics_host})
            async with open_local_swarm(self._logs, network_flags=flags) as swarm:
                return await self._train_in(swarm, console, stop, beside)

    async def _train_in(self, swarm: LocalSwarm, console: Console, stop: Stop, beside: Beside) -> int:
        folders = self.folders()
        watches = {f"trainer{index}": TrainerWatch(folder) for index, folder in enumerate(folders)}
        view = LocalView(console, swarm, watches, self.run_length.steps, announce=self.network.announce)
        async with (
            self.metrics.opened("up", {"/targets": view.targets}) as monitor,
            trio.open_nursery() as showing,
        ):
            console.print(f"run folder: {self.out}; logs of the processes: {self._logs}")
            monitor.show(view.families)
            monitor.why_not_ready = view.why_not_ready
            showing.start_soon(view.run)
            dht = await swarm.start("dht", ["dht", *self.listen_flags()])
            named_by, flags = "--experts" if self.swarm.claim is None else "--of", self.flags_of_nodes()
            for index, hand in enumerate(self.hands()):
                words = ["node", "--join", dht.contact, *self.saving_flags(index), *flags, named_by, *hand]
                await swarm.launch(f"node{index}", words)
            # Together with the nodes: they read their text and wait for experts while those compile.
            for index, (name, folder) in enumerate(zip(watches, folders, strict=True)):
                await swarm.launch(name, ["train", "--join", dht.contact, *self._words_of_trainer(index, folder)])
            with stop.body() as body:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(beside, swarm, watches)
                    for node in swarm.of_kind("node"):
                        nursery.start_soon(node.ready)
                    for trainer in swarm.of_kind("train"):
                        check_status(trainer, await trainer.process.wait())
                    if not folders:
                        await trio.sleep_forever()
                    nursery.cancel_scope.cancel()
            if body.cancelled_caught:
                console.print("ending all processes in order; Ctrl-C again ends them at once")
            await swarm.end_in_order()
            showing.cancel_scope.cancel()
        return EXIT_INTERRUPTED if body.cancelled_caught else 0

    def _words_of_trainer(self, index: int, folder: Path) -> list[str]:
        """Words behind `dmoe train --join PEER` of a trainer process."""
        goes_on = self.folder.resume and (folder / CONFIG).exists()
        return ["--out", str(folder), *self.flags_of_trainer(index), *(["--resume"] if goes_on else [])]

    def folders(self) -> list[Path]:
        """The run folder of each trainer process: --out, and others beside it."""
        return [trainer_folder(self.out, index) for index in range(self.swarm.trainers)]

    def check(self) -> None:
        """Raise `UsageError` for a flag that cannot be meant, before anything is started."""
        swarm = self.swarm
        with mistakes_in_one_line():
            check_local(self.out, "a run")
        check_at_least(1, swarm, "nodes")
        check_at_least(0, swarm, "trainers")
        check_at_least(1, self, "average_every")
        self.run_length.check()
        self.language.check()
        self.data.check(more=swarm.trainers)
        if self.data.init is not None and not swarm.save_experts:
            raise UsageError("--init needs the experts' folders, which --no-save-experts leaves out")
        init, is_own = self.data.init, bool(self.code.model or self.code.kind != "transformer_xl")
        if init is not None and url_of(init) is None and not is_own and not self.folder.resume:
            check_init(init, self.language)
        if swarm.trainers < 2:
            check_no_effect(f"--trainers {swarm.trainers}: nobody averages", flags_of(self.budget))
        saved = [saved_experts(self.out)] if swarm.save_experts else []
        for folder in [] if self.folder.resume else [*(self.folders() or [self.out]), *saved]:
            if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
                raise UsageError(f"--out must be a new or empty folder, {folder} is not")
        num_experts = len(self.uids())
        if swarm.claim is not None:
            check_at_least(1, swarm, "claim")
            if (room := swarm.nodes * swarm.claim) < num_experts:
                unserved = f"{num_experts - room} of {num_experts} experts unserved"
                raise UsageError(f"--nodes {swarm.nodes} with --claim {swarm.claim} leave {unserved}")
        elif not all(self.hands()):
            raise UsageError(f"--nodes {swarm.nodes} is more than there are experts: {num_experts}")
        self.data.check_text(self.code.model)
        with mistakes_in_one_line():
            self.network.security()
            if self.network.announce is not None:
                ListenOptions(listen="0.0.0.0:0", announce=self.network.announce)
        if self.code.trunk_optimizer:
            check_no_effect(f"--trunk-optimizer {self.code.trunk_optimizer}", flags_of(self.adam))
        for name in ("node_flags", "train_flags"):
            try:
                shlex.split(getattr(swarm, name))
            except ValueError as error:
                raise UsageError(f"{flag_of(name)}: {error}, got {getattr(swarm, name)!r}") from error
        code = self.code
        check_file("--expert", code.kind if ":" in code.kind else None)
        check_file("--optimizer", code.optimizer or None)
        check_file("--trunk-optimizer", code.trunk_optimizer or None)
        for index, folder in enumerate(self.folders()):
            check_trainer(["--join", "localhost:1", *self._words_of_trainer(index, folder)])

    @cached_property
    def out(self) -> Path:
        """Run folder of the first trainer process."""
        return self.folder.out or Path("runs") / time.strftime("up-%Y%m%d-%H%M%S")

    def listen_flags(self) -> list[str]:
        """Flags of those that listen for their address."""
        return [] if self.network.announce is None else ["--listen", "0.0.0.0:0", "--announce", self.network.announce]

    def hands(self) -> list[list[str]]:
        """The experts of each node; with --claim the patterns, of which each node takes its share."""
        nodes = self.swarm.nodes
        return deal(self.uids(), nodes) if self.swarm.claim is None else [list(self.patterns())] * nodes

    def patterns(self) -> tuple[str, ...]:
        """Patterns of the experts: --experts, or the grid of each layer."""
        grid = "".join(f".[0:{size}]" for size in self.language.grid_size)
        return self.code.experts or tuple(f"{layer_prefix(layer)}{grid}" for layer in range(self.language.num_layers))

    def uids(self) -> list[ExpertUid]:
        """All experts, each once; raises UsageError if --experts is no pattern."""
        with mistakes_in_one_line("--experts"):
            return list(dict.fromkeys(uid for each in self.patterns() for uid in expand_grid_pattern(each)))

    def saving_flags(self, index: int) -> list[str]:
        """Flags of `dmoe node` for its claims and its saved experts, by its index."""
        claims = [] if self.swarm.claim is None else as_flags({"claim": self.swarm.claim})
        # Those that claim share a folder: there they find what a node that died has left.
        folder = saved_experts(self.out) / (f"node{index}" if self.swarm.claim is None else SHARED_FOLDER)
        return [*claims, *(as_flags({"checkpoint_dir": folder}) if self.swarm.save_experts else [])]

    def flags_of_nodes(self) -> list[str]:
        """Flags of `dmoe node` that all nodes share."""
        code, route = self.code, self.language.route
        threads = share_of_threads(self.swarm.nodes, may_call_host=bool(code.optimizer) or ":" in code.kind)
        kind = {} if code.kind == "transformer_xl" else {"expert": code.kind}
        kind |= {"optimizer": code.optimizer} if code.optimizer else {}
        kind |= {} if route == "sequence" else {"route": route}
        node: dict[str, Any] = {"seed": self.data.seed, "announce_period_s": 5, "xla_threads": threads}
        node |= {} if self.data.init is None else {"init": self.data.init}
        layer = words_of(self.language.layer)
        return [*self.listen_flags(), *as_flags(kind), *layer, *as_flags(node), *shlex.split(self.swarm.node_flags)]

    def flags_of_trainer(self, index: int) -> list[str]:
        """Flags of `dmoe train` for one trainer process, besides its folder and whom it joins."""
        data, code, swarm = self.data, self.code, self.swarm
        words: list[str] = []
        language = () if code.model else (self.language,)
        for flag in (each for group in (*language, data, self.adam, self.run_length) for each in flags_of(group)):
            # A run that goes on takes its own flags where none are given, and not the defaults.
            is_said = flag.is_changed or (self.folder.resume and flag.value is not None and flag.value is not False)
            if is_said and flag.word not in ("--seed", "--data-seed"):
                words += as_words(flag.word, flag.value)
        words += ["--model", code.model] if code.model else []
        words += ["--optimizer", code.trunk_optimizer] if code.trunk_optimizer else []
        words += as_flags({"seed": data.seed, "data_seed": data.chance_seed + index})
        if swarm.trainers > 1:
            words += as_flags({"average_every": self.average_every, "average_side": swarm.trainers})
            words += [*self.listen_flags(), "--memory-budget", self.budget.memory_budget]
        words += shlex.split(swarm.train_flags)
        # Those beside the first one read less: its evaluations are the run's.
        return words + (as_flags({"eval_tokens": 1024, "final_eval_tokens": 16384}) if index else [])
