"""Work of a process of eight devices for `test_mesh`; it prints a line for each thing that holds."""

import itertools
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import trio
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from dmoe_jax.autodiff import Recording, value_and_grad
from dmoe_jax.checkpoints import Checkpoints
from dmoe_jax.cli.training import run_training
from dmoe_jax.data.batches import SegmentStream, evaluation_segments
from dmoe_jax.layer_config import LayerConfig, Recipe
from dmoe_jax.machine.device import InlineDevice
from dmoe_jax.mesh.layout import MeshShape, laid_out, layout_of, mesh_of, rows_like, shardings_like
from dmoe_jax.mixture.rows import Rows
from dmoe_jax.models.config import TransformerXLConfig
from dmoe_jax.models.transformer_xl import TransformerXL
from dmoe_jax.optim import (
    ErrorFeedback,
    HostState,
    averaging_due,
    moshpit_average,
    noloco,
    scale_by_stale_adam,
    streaming_diloco,
    what_to_send,
    with_average,
)
from dmoe_jax.optim.recipe import make_optimizer
from dmoe_jax.peers.security import Plain
from dmoe_jax.routing.product_key import product_key
from dmoe_jax.runs.run_folder import RunFolder, read_metrics
from dmoe_jax.swarm.opening import open_swarm
from dmoe_jax.swarm.swarm import Swarm
from dmoe_jax.trained.loading import load_run
from dmoe_jax.trainer import Trainers, loss_and_grads
from dmoe_jax.trunk import SharedTrunk
from tests.dmoe_jax.eight_devices import count_compilations
from tests.dmoe_jax.training_rig import command, served_swarm, text_of_few_words

MESH = "data=2,model=4"
PARAMS: dict[str, Any] = {
    "table": np.linspace(-1, 1, 16 * 8, dtype=np.float32).reshape(16, 8),
    "deep": {"kernel": np.linspace(0, 1, 8 * 32, dtype=np.float32).reshape(8, 32), "bias": np.ones(32, np.float32)},
    "odd": np.ones(3, np.float32),
    "scale": np.float32(0.5),
}
ADAM = optax.adam(1e-2)
SGD = optax.sgd(0.1)
RECIPE = make_optimizer(Recipe(warmup_steps=0, weight_decay=0.1))
OPTIMIZERS: dict[str, optax.GradientTransformation] = {
    "adam": ADAM,
    "momentum": optax.sgd(1e-2, momentum=0.9),
    "recipe": RECIPE,
    "stale adam": optax.chain(scale_by_stale_adam(), optax.scale(-1e-2)),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "lion": optax.lion(1e-3),
    "parameters": moshpit_average(ADAM, every=3, weighted=True),
    "gradients": moshpit_average(ADAM, every=3, what="gradients", weighted=True),
    "pseudo-gradients": moshpit_average(ADAM, every=3, what="pseudo_gradients"),
    "compressed": moshpit_average(SGD, what="pseudo_gradients", outer=SGD, compress=ErrorFeedback()),
    "streaming": streaming_diloco(ADAM, every=4, fragments=2),
    "noloco": noloco(ADAM, every=3),
}


COMPILATIONS = count_compilations()


def shardings(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def agree(found: Any, expected: Any, atol: float = 1e-5) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol), found, expected)


def gradient(step: int, params: Any) -> Any:
    return jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size) + step).reshape(leaf.shape).astype(leaf.dtype), params)


def parameters_by_the_rule() -> None:
    """Each array along its largest dimension, wherever it comes from: the host, a device, another mesh."""
    placed = laid_out(PARAMS, MESH)
    found = jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), placed)
    assert found == {"table": (4, 8), "deep": {"kernel": (8, 8), "bias": (8,)}, "odd": (3,), "scale": ()}
    agree(placed, PARAMS, 0)
    grid = np.array(jax.devices()).reshape(4, 2)
    for mesh in (Mesh(grid, ("model", "data")), Mesh(grid.T, ("data", "model")), MeshShape(data=2, model=4)):
        again = laid_out(placed, mesh)
        assert jax.tree.map(lambda leaf: leaf.sharding.shard_shape(leaf.shape), again) == found
        agree(again, PARAMS, 0)
    # Whichever order its axes have, neighbours in `model` are.
    assert layout_of(Mesh(grid, ("model", "data"))).devices == tuple(grid.T.flat)

    def first_dimension(name: str, array: Any, shape: MeshShape) -> PartitionSpec:
        return PartitionSpec(("data", "model")) if name == "table" else PartitionSpec()

    ruled = laid_out(PARAMS, MeshShape(data=2, model=4, rule=first_dimension))
    assert ruled["table"].sharding.shard_shape((16, 8)) == (2, 8)
    assert ruled["deep"]["kernel"].sharding.shard_shape((8, 32)) == (8, 32)
    (alone,) = {device for leaf in jax.tree.leaves(laid_out(PARAMS, "data=1")) for device in leaf.devices()}
    assert alone == jax.devices()[0]
    print("parameters by the rule")


def own_shardings() -> Any:
    """Parameters as their owner laid them out: one over two axes of other names, others on no device yet."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("rows", "columns"))
    table: Any = jax.device_put(PARAMS["table"], NamedSharding(mesh, PartitionSpec("columns", "rows")))
    return laid_out(PARAMS | {"table": table}, None)


def parameters_of_ones_own() -> None:
    """They stay; those beside them are whole on each of their devices. A batch is, too: no axis is its own."""
    placed = own_shardings()
    assert placed["table"].sharding.spec == PartitionSpec("columns", "rows")
    assert placed["odd"].sharding.is_fully_replicated
    assert placed["odd"].sharding.device_set == {*jax.devices()}
    batch: Any = rows_like(placed)({"x": np.ones((4, 2)), "name": "a text"})
    assert batch["x"].sharding.is_fully_replicated
    assert batch["name"] == "a text"
    print("parameters of one's own")


async def axes_that_are_part_of_a_type() -> None:
    """JAX's newer meshes: nothing is said of a gradient whose type says where it lies."""
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    table = jax.device_put(PARAMS["table"], NamedSharding(mesh, PartitionSpec("model")))

    def mean(params: Any, x: Any) -> Any:
        return ((x @ params["table"] + params["bias"]) ** 2).mean()

    async def forward(run: Recording, params: Any, x: Any) -> Any:
        return run(mean, params, x)

    found: list[Any] = []
    for params in ({"table": PARAMS["table"]}, {"table": table}):
        trunk = SharedTrunk(laid_out(params | {"bias": np.ones(8, np.float32)}, None), ADAM, InlineDevice())
        first = trunk.params
        batch = rows_like(first)(np.linspace(0, 1, 64, dtype=np.float32).reshape(4, 16))
        for _ in range(3):
            loss, grads = await value_and_grad(forward)(trunk.params, batch)
            jax.tree.map(_lies_as, grads, first)
            await trunk.apply(grads)
        jax.tree.map(_lies_as, trunk.params, first)
        found.append((loss, jax.device_get(trunk.params)))
    agree(*found)
    print("axes that are part of a type")


def batches_by_rows() -> None:
    """Rows over `data` where they are a multiple of its devices; what lies on several devices already stays."""
    placed = rows_like(laid_out(PARAMS, MESH))
    text = np.array(["a", "b"])
    kept: list[Any] = [np.float32(1), [1, 2], text]
    batch: Any = placed((np.ones((6, 2)), np.ones(5), *kept, laid_out(PARAMS, "model=8")["table"]))
    assert [batch[i].sharding.shard_shape(batch[i].shape) for i in (0, 1, 5)] == [(3, 2), (5,), (2, 8)]
    assert [each is own for each, own in zip(batch[2:5], kept, strict=True)] == [True, False, True]
    assert batch[3] == kept[1]
    assert rows_like(PARAMS)(batch) is batch
    print("batches by rows")


def rows_of_a_process() -> None:
    """Rows come to the host and back in place, whether `data` splits them or not, and once, however many hold them."""
    for mesh, number in (("data=4,model=2", 8), ("data=2,model=4", 7), ("model=8", 3)):
        rows = Rows(number=number, mesh=layout_of(mesh).mesh)
        numbers = np.arange(number * 3, dtype=np.float32).reshape(number, 3) + 1
        array = jax.device_put(numbers, rows.sharding)
        agree(rows.taken(array), numbers, 0)
        agree(rows.taken(numbers), numbers, 0)
        agree(rows.spread(numbers), numbers, 0)
        vars(rows)["are_shared"] = True  # as if another process held some of them
        agree(np.asarray(rows.spread(numbers)).sum(axis=0), numbers, 0)
    print("rows of a process")


def averaged_with_nobody(trunk: SharedTrunk) -> None:
    """Do what a host does that averages: what comes from the network lies on no mesh."""
    states = [leaf for leaf in jax.tree.leaves(trunk.opt_state, is_leaf=is_averaged) if is_averaged(leaf)]
    for fragment in range(len(states[0].due.reshape(-1)) if states else 0):
        if averaging_due(trunk.opt_state, fragment):
            sent = what_to_send(trunk.opt_state, trunk.params, fragment=fragment)
            averaged = jax.tree.map(lambda leaf: 0.5 * np.asarray(leaf), sent.tree)
            trunk.opt_state = with_average(trunk.opt_state, sent, averaged, fragment=fragment)


def is_averaged(state: Any) -> bool:
    return isinstance(state, HostState)


async def updates_stay(name: str, optimizer: optax.GradientTransformation, params: Any) -> None:
    """Five updates are those of one device; every array stays where it began, an optimiser's with its parameter."""
    trunk, alone = SharedTrunk(params, optimizer, InlineDevice()), SharedTrunk(PARAMS, optimizer, InlineDevice())
    before = shardings((trunk.params, trunk.opt_state))
    assert before == (shardings(params), shardings_like(trunk.opt_state, params))
    assert {len(each.device_set) for each in jax.tree.leaves(before)} == {8}, name
    for step in range(5):
        donated = [leaf for leaf in jax.tree.leaves(trunk.opt_state) if len(leaf.devices()) == 8]
        for each in (trunk, alone):
            await each.apply(gradient(step, PARAMS), samples=4, read_at=max(0, step - 1), read_params=each.params)
        assert all(leaf.is_deleted() for leaf in donated if leaf.size > 3), name
        assert shardings((trunk.params, trunk.opt_state)) == before, name
        for each in (trunk, alone) if step < 4 else ():
            averaged_with_nobody(each)
    agree((trunk.params, trunk.opt_state), (alone.params, alone.opt_state))
    # What was saved on a mesh goes on without one, and the other way round.
    step, state = await trunk.snapshot()
    trunk.restore(*await alone.snapshot())
    alone.restore(step, state)
    assert shardings((trunk.params, trunk.opt_state)) == before, name
    agree((trunk.params, trunk.opt_state), (alone.params, alone.opt_state))
    await trunk.apply(gradient(7, PARAMS), samples=4)
    await alone.apply(gradient(7, PARAMS), samples=4)
    agree(trunk.params, alone.params)


async def optimizers_stay() -> None:
    for name, optimizer in OPTIMIZERS.items():
        await updates_stay(name, optimizer, laid_out(PARAMS, MESH))
    await updates_stay("adam", ADAM, own_shardings())
    moments = jax.tree.leaves(SharedTrunk(laid_out(PARAMS, MESH), ADAM, InlineDevice()).opt_state)
    assert [leaf.sharding.shard_shape(leaf.shape) for leaf in moments if leaf.shape == (16, 8)] == [(4, 8)] * 2
    print("optimizers stay")


async def moments_stay_where_they_are() -> None:
    """Each update writes every part of Adam's moments where it was."""
    trunk = SharedTrunk(laid_out(PARAMS, MESH), ADAM, InlineDevice())

    def places() -> list[int]:
        arrays = [leaf for leaf in jax.tree.leaves(trunk.opt_state) if leaf.shape == (16, 8)]
        return [shard.data.unsafe_buffer_pointer() for leaf in arrays for shard in leaf.addressable_shards]

    await trunk.apply(gradient(0, PARAMS))
    before = places()
    await trunk.apply(gradient(1, PARAMS))
    assert len(set(before)) == 16
    assert places() == before
    print("moments stay where they are")


CONFIG = TransformerXLConfig(
    vocab_size=40,
    num_layers=2,
    grid_size=(2, 2),
    k_best=2,
    cutoffs=(20,),
    layer=LayerConfig(d_model=16, num_heads=2, d_ff=32, seq_len=8, mem_len=8),
)
DROPPING = CONFIG.replace(dropout=0.2, attention_dropout=0.1).replace(embedding_dropout=0.1, input_dropout=0.3)
TOKENS = DROPPING.replace(route="token")
ROUTER = product_key((2, 2), init_scale=1.0)
TEXT = np.random.default_rng(0).integers(0, 40, 2000)


def stream(shard: int = 0) -> SegmentStream:
    return SegmentStream(np.roll(TEXT, 100 * shard), batch_size=4, seq_len=CONFIG.seq_len)


@asynccontextmanager
async def trained_swarm(config: TransformerXLConfig) -> AsyncIterator[tuple[Swarm, TransformerXL]]:
    """A swarm that begins as any other of this configuration."""
    async with open_swarm(listen="127.0.0.1:0", security=Plain(), seed=0) as swarm:
        patterns = dict.fromkeys(("layer0.[0:2].[0:2]", "layer1.[0:2].[0:2]"), config.expert())
        await swarm.serve(patterns, optimizer=SGD, warm_up_rows=4)
        yield swarm, TransformerXL.on(swarm, config, ROUTER, timeout_s=300.0)


async def losses(
    config: TransformerXLConfig, mesh: Any, steps: int = 20, params: Callable[[Any], Any] = lambda params: None
) -> tuple[list[float], Any, float]:
    """Losses of a trainer's steps, its parameters after them, and the loss of an evaluation."""
    found: list[float] = []
    async with trained_swarm(config) as (swarm, model):
        own = params(model.init(jax.random.key(0)))
        trainers = swarm.trainer(model, RECIPE, stream(), mesh=mesh, params=own)
        before = shardings(trainers.state())
        await trainers.run(3, lambda record: found.append(record.loss))
        compiled = COMPILATIONS.count
        await trainers.run(steps - 3, lambda record: found.append(record.loss))
        if not config.routes_tokens:  # else nodes compile for other numbers of rows
            assert COMPILATIONS.count == compiled
        assert shardings(trainers.state()) == before
        spread = mesh is not None or own is not None
        assert (mesh_of(trainers.params) is not None) == spread
        if spread:
            (memory,) = (trainer.state for trainer in trainers.trainers)
            assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(memory)} == {8}
        segments = itertools.islice(evaluation_segments(TEXT, batch_size=4, seq_len=8), 4)
        evaluation = await trainers.evaluate(segments)
        return found, jax.device_get(trainers.params), evaluation.loss


def owned(params: Any) -> Any:
    """All but the gates along the first dimension that eight divides, of a mesh of one axis."""
    mesh = Mesh(np.array(jax.devices()), ("all",))

    def place(leaf: Any) -> Any:
        split = PartitionSpec("all") if leaf.ndim and leaf.shape[0] % 8 == 0 else PartitionSpec()
        return jax.device_put(leaf, NamedSharding(mesh, split))

    return {"embed": jax.tree.map(place, params["embed"])} | {name: params[name] for name in params if name != "embed"}


async def trainers_learn_the_same() -> None:
    """Twenty steps, with dropout and memory, are those of one device to 1e-5, whatever lies where."""
    for config in (DROPPING, TOKENS):
        alone = await losses(config, None)
        agree(await losses(config, MESH), alone)
        if config is DROPPING:
            agree(await losses(config, "model=8"), alone)
    agree(await losses(config, None, params=owned), alone)
    print("trainers learn the same")


async def gradients_lie_as_parameters() -> None:
    """Those of the model's parameters come out of the backward pass as these lie."""
    async with trained_swarm(TOKENS) as (_, model):
        params, batch = laid_out(model.init(jax.random.key(0)), MESH), next(stream())
        keys = model.keys(batch, seed=0, trainer=0, step=0)
        placed = rows_like(params)
        _, grads = await loss_and_grads(model)(params, placed(batch), placed(model.initial_state(batch)), keys)
        jax.tree.map(lambda grad, own: _lies_as(grad, own), grads, params)
    print("gradients lie as parameters")


def _lies_as(grad: Any, own: Any) -> None:
    assert grad.sharding.is_equivalent_to(own.sharding, own.ndim), (grad.sharding, own.sharding)


async def several_trainers_at_once(num_steps: int = 12) -> None:
    """Four trainers of one trunk on the mesh: whatever overlaps, all comes to an end."""
    async with trained_swarm(DROPPING) as (swarm, model):
        trainers = swarm.trainer(model, RECIPE, [stream(shard) for shard in range(4)], mesh=MESH)
        before = shardings(trainers.state())
        await trainers.run(num_steps)
        assert trainers.step == num_steps
        assert shardings(trainers.state()) == before
    print("several trainers at once")


async def a_run_goes_on_elsewhere(folder: Path) -> None:
    """From a mesh to one device and back, through files, twenty steps are those of one device."""
    alone = await losses(DROPPING, None, steps=9)
    async with trained_swarm(DROPPING) as (swarm, model):
        found: list[float] = []
        last: Trainers[Any, Any, SharedTrunk] | None = None
        for mesh in (MESH, None, "data=8"):
            trainers = swarm.trainer(model, RECIPE, stream(), mesh=mesh)
            if last is not None:
                checkpoints = Checkpoints(folder)
                checkpoints.save(*await last.snapshot(), {})
                trainers.restore(*checkpoints.restore_latest(trainers.state()))
                checkpoints.close()
                (trainer,), (before,) = trainers.trainers, last.trainers
                trainer.seek(before.position)
                trainer.state = jax.device_get(before.state)
            await trainers.run(3, lambda record: found.append(record.loss))
            last = trainers
        assert last is not None
        agree((found, jax.device_get(last.params)), alone[:2])
    print("a run goes on elsewhere")


async def a_collaboration() -> None:
    """A peer alone makes the steps of one device, of gradients and of pseudo-gradients."""
    for average in ("gradients", "pseudo_gradients"):
        found = []
        for mesh in (None, MESH):
            async with trained_swarm(CONFIG) as (swarm, model):
                options: dict[str, Any] = {"target_batch_size": 64, "average": average, "mesh": mesh}
                async with swarm.collaborate(model, SGD, stream(), **options) as trainers:
                    assert (mesh_of(trainers.params) is not None) == (mesh is not None)
                    await trainers.run(3)
                    found.append(jax.device_get(trainers.params))
        agree(*found)
    print("a collaboration")


async def the_command(folder: Path) -> None:
    """`dmoe train --mesh`, resumed on one device and on another mesh; the folder is read as any other."""
    text, out = text_of_few_words(folder), folder / "run"
    async with served_swarm() as (_, swarm):
        for steps, mesh, devices in ((4, "data=2,model=2", None), (8, "data=1", None), (12, None, "4-7")):
            now = command(out, text, steps=steps, mesh=mesh, devices=devices, resume=steps > 4)
            assert (await run_training(now, now.prepared(), swarm))["steps"] == steps
            saved = RunFolder(out).config()["settings"]
            assert (saved["trunk"]["devices"]["mesh"], saved["trunk"]["devices"]["devices"]) == (mesh, devices)
    assert [each["step"] for each in read_metrics(out / "metrics.jsonl") if each["kind"] == "eval"][-1] == 12
    assert load_run(out).step == 12
    print("the command")


def refused() -> None:
    """Print the error of each mesh that cannot be, a line each."""
    names = Mesh(np.array(jax.devices()), ("expert",))
    wide = replace(MeshShape.parse(MESH), rule=lambda name, array, mesh: PartitionSpec("rows"))
    for mesh in ("data=4,model=4", "rows=2", names, wide):
        try:
            laid_out(PARAMS, mesh)
        except ValueError as error:
            print(error)


async def updates() -> None:
    """Work on parameters and states alone."""
    parameters_by_the_rule()
    parameters_of_ones_own()
    await axes_that_are_part_of_a_type()
    batches_by_rows()
    rows_of_a_process()
    await optimizers_stay()
    await moments_stay_where_they_are()
    refused()


async def training() -> None:
    """Work of trainers over a swarm."""
    await gradients_lie_as_parameters()
    await trainers_learn_the_same()
    await several_trainers_at_once()
    await a_collaboration()
    with tempfile.TemporaryDirectory() as folder:
        await a_run_goes_on_elsewhere(Path(folder) / "checkpoints")
        await the_command(Path(folder))


if __name__ == "__main__":
    trio.run({"updates": updates, "training": training}[sys.argv[1]])
