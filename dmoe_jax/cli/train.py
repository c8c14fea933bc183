"""`dmoe train`: asynchronous trainers of a language model, or a model of one's own, over the swarm's experts."""

import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial

from dmoe_jax.cli.distributed import failing_at_once
from dmoe_jax.cli.lifecycle import Stop, run_until_done
from dmoe_jax.cli.network import join_swarm
from dmoe_jax.cli.sources import Given
from dmoe_jax.cli.train_options import ReportOptions, TrainOptions, check_changes, flags_of_run
from dmoe_jax.metrics.process import peer_families
from dmoe_jax.metrics.trackers import tracking
from dmoe_jax.runs.endings import mistakes_in_one_line
from dmoe_jax.runs.run_folder import CONFIG, flat
from dmoe_jax.training.prepared_run import PreparedRun, prepare_run, saved_settings


@dataclass(frozen=True, kw_only=True)
class TrainCommand(TrainOptions):
    """Train a DMoE Transformer-XL, or a model of your own, over a swarm, with several asynchronous trainers.

    The run folder holds config.json, metrics.jsonl, figure.png and report.md, also after Ctrl-C.
    """

    def resumed(self, given: Given) -> "TrainCommand":
        """The command with the flags of the run that it goes on with, and the given ones. Raises UsageError if --out
        is no run, or names code that the user does not."""
        if not self.folder.resume or (out := self.folder.out) is None or not (out / CONFIG).exists():
            return self
        with mistakes_in_one_line():
            saved = flags_of_run(saved_settings(out))
        return given.resumed(TrainCommand, saved, out, prog="dmoe train", is_trusted=self.folder.trust_run)

    def prepared(self) -> PreparedRun:
        """The run in its folder; nothing is written yet. Raises UsageError if the flags or the folder will not do."""
        self.check()
        settings, out, resume = self.settings(), self.folder.out, self.folder.resume
        goes_on = resume and out is not None and (out / CONFIG).exists()
        with mistakes_in_one_line():
            saved = saved_settings(out) if goes_on and out is not None else {}
            run = prepare_run(out, settings, name="train", resume=resume, may_differ={*flat(settings), *flat(saved)})
            if out is not None and run.goes_on:
                check_changes(out, saved, settings)
            if resume and not run.has_checkpoint:
                hint = "to begin anew, leave --resume out and take a new folder for --out"
                raise ValueError(f"there is no checkpoint in {out} to resume from; {hint}")
        return run

    def run(self) -> int:
        with failing_at_once():
            status = run_until_done(self._train, exit_on_stdin_eof=self.exit_on_stdin_eof)
            if status and self.trunk.devices.distributed is not None:  # the others do not end in order either
                sys.exit(status)
        return status

    async def _train(self, stop: Stop) -> int:
        del stop  # a cancelled run writes its report by itself
        devices = self.trunk.devices
        prepared = self.prepared() if devices.distributed is None else None
        self.check()
        await devices.set_up()
        command = self
        if devices.follows:  # it has nothing to say
            command = replace(self, report=ReportOptions(), listening=replace(self.listening, write_contact=None))
        elif prepared is None:
            prepared = self.prepared()
        with mistakes_in_one_line():
            devices.mesh_of_trunk()
        await command._train_prepared(prepared)
        return 0

    async def _train_prepared(self, prepared: PreparedRun | None) -> None:
        """Train in the folder; without one, do as process 0 does."""
        from dmoe_jax.cli.trained_models import check_before_joining
        from dmoe_jax.cli.training import run_training
        from dmoe_jax.swarm.opening import swarm_of

        await check_before_joining(self)
        listen = self.listening if self.listens else None
        with ExitStack() as stack:
            if prepared is not None:
                with mistakes_in_one_line():
                    told = flat(prepared.settings)
                    opening = tracking(self.report.tracker, project=self.network.swarm, settings=told)
                    prepared = replace(prepared, open_sink=stack.enter_context(opening))
            async with (
                self.report.metrics.opened("train") as monitor,
                join_swarm(self.network, join=self.join, listen=listen, budget=self.budget) as peer,
                swarm_of(peer, name=self.network.swarm, seed=self.data.seed) as swarm,
            ):
                monitor.show(partial(peer_families, peer))
                await run_training(self, prepared, swarm, monitor)
