"""The flags that name a trained model, and the way to it. Nothing here imports JAX before a model is loaded."""

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import trio
import tyro

from dmoe_jax.cli.network import JoinTexts, MemberOptions, join_swarm
from dmoe_jax.runs.endings import UsageError, mistakes_in_one_line
from dmoe_jax.runs.setting_up import set_up_jax

if TYPE_CHECKING:
    from dmoe_jax.trained.language_model import AsyncTrainedModel, TrainedModel


@dataclass(frozen=True, kw_only=True)
class TrainedModelOptions:
    """A trained model, and its experts."""

    run_folder: Annotated[tyro.conf.Positional[Path | None], tyro.conf.arg(name="run", metavar="[RUN]")] = None
    """Folder of a run of dmoe train, dmoe demo, dmoe up or experiments.transformer_xl, finished or not; or a file or
    folder of dmoe export; also at gs:// or s3://. Without it the model is that of the trainers of --join."""
    experts: Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FOLDER [FOLDER ...]")] = ()
    """Folders in which the nodes of a swarm saved its experts, each one's --checkpoint-dir. Default: those of dmoe up,
    of dmoe demo --save-experts, or of experiments.transformer_xl."""
    checkpoint: Literal["last", "best"] | int = "last"
    """Checkpoint of the run: last, best (of the least loss in an evaluation on the way), or its step. The experts of a
    swarm are as their nodes saved them last."""
    join: JoinTexts = ()
    """Peers of a swarm that is alive, whose experts are asked instead. They do not learn from it."""
    network: Annotated[MemberOptions, tyro.conf.arg(name="")] = field(default_factory=MemberOptions)
    """Identity of this process in that swarm."""
    data: str | None = None
    """The text that the run was trained on, as for dmoe train. Default: as the run had it."""
    router: Annotated[str | None, tyro.conf.arg(metavar="FILE.py:NAME")] = None
    """The run's router again, if it is out of a file of your own: no file is run only because a run names it."""
    trust_run: bool = False
    """Run the Python file that the run names for its router."""

    @asynccontextmanager
    async def opened(
        self, change: "Callable[[TrainedModel], TrainedModel]" = lambda model: model
    ) -> "AsyncIterator[AsyncTrainedModel]":
        """The model as it was loaded and changed, with its experts at hand or in a swarm. Raises UsageError if there is
        no such model, and for a ValueError in the block; NetError if the swarm cannot carry it."""
        if self.join and self.experts:
            raise UsageError("--experts would have no effect beside --join: the experts are those of the swarm")
        if self.run_folder is None:
            if not self.join:
                raise UsageError("expected RUN, the folder of a run, or --join with a peer of a swarm that trains one")
            if self.checkpoint != "last":
                raise UsageError(f"--checkpoint {self.checkpoint} would have no effect without RUN")
        set_up_jax()
        async with AsyncExitStack() as stack:
            stack.enter_context(mistakes_in_one_line())
            if self.run_folder is not None:
                # In a thread, so that Ctrl-C is heard.
                load = partial(self._load, self.run_folder)
                model = await trio.to_thread.run_sync(load, abandon_on_cancel=True)
            if not self.join:
                yield change(model).under_trio()
                return
            from dmoe_jax.swarm.opening import swarm_of
            from dmoe_jax.trained.loading import fetch_run

            peer = await stack.enter_async_context(join_swarm(self.network, join=self.join))
            swarm = await stack.enter_async_context(swarm_of(peer, name=self.network.swarm))
            if self.run_folder is None:
                model = await fetch_run(swarm, data=self.data, router=self.router)
            yield change(model).on(swarm)

    @property
    def model_name(self) -> str:
        """Name of the model for people."""
        return self.network.swarm if self.run_folder is None else self.run_folder.resolve().name

    def _load(self, path: Path) -> "TrainedModel":
        from dmoe_jax.trained.loading import load_folder

        return load_folder(path, self.experts, self.checkpoint, self.data, self.router, self.trust_run)
