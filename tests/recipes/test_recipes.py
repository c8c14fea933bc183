"""Recipes for Kubernetes, Compose and SkyPilot: files of the engines' schemas, whose command lines do what they say.

Slurm's has a cluster of its own, `test_slurm.py`.
"""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from dmoe_jax.cli import Command
from dmoe_jax.cli.node import NodeCommand
from dmoe_jax.cli.sources import gather
from dmoe_jax.cli.train import TrainCommand
from dmoe_jax.directory.grid import expand_grid_pattern
from dmoe_jax.runs.command_line import commands_of, parse_command_line
from dmoe_jax.runs.flags import flags_of
from tests.recipes.containers import ALL, RECIPES, Container, compose_file, documents, image, kubernetes, skypilot
from tests.recipes.engine import Engine, open_engine

OBJECTS = {f"{each['kind']}/{each['metadata']['name']}": each for each in documents(RECIPES / "kubernetes")}
TASKS = sorted((RECIPES / "skypilot").glob("*.yaml"))
TRAINER_GRACE_S = 60.0
"""Seconds that `dmoe up` gives trainers to write their ends; no recipe gives less."""


def pods() -> Iterator[Any]:
    """The pod templates of all objects."""
    for each in OBJECTS.values():
        if each["kind"] == "StatefulSet":
            yield pytest.param(each["spec"]["template"]["spec"], id=each["metadata"]["name"])
        for job in each["spec"]["replicatedJobs"] if each["kind"] == "JobSet" else ():
            yield pytest.param(job["template"]["spec"]["template"]["spec"], id=each["metadata"]["name"])


# Schemas


@pytest.mark.parametrize("name", [name for name in OBJECTS if not name.startswith("JobSet/")])
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_takes_the_object(name: str, version: str) -> None:
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'dmoe_jax[recipes]'")
    validate.validate(OBJECTS[name], version, strict=True)


def test_kubernetes_takes_the_job_of_the_trainers() -> None:
    """JobSet makes it of its template, as it stands."""
    validate = pytest.importorskip("kubernetes_validate", reason="pip install 'dmoe_jax[recipes]'")
    (job,) = OBJECTS["JobSet/dmoe-trainers"]["spec"]["replicatedJobs"]
    made = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "trainer"}, **deepcopy(job["template"])}
    validate.validate(made, "1.30", strict=True)
    made["spec"]["podFailurePolicy"]["rules"][0]["onExitCode"] = {}
    with pytest.raises(validate.ValidationError, match="onExitCode"):
        validate.validate(made, "1.30", strict=True)


def test_jobset_takes_the_trainers() -> None:
    """Every field is one of JobSet's: what its model does not know it leaves out."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install kubeflow-trainer-api")
    jobset = OBJECTS["JobSet/dmoe-trainers"]
    assert is_part(jobset, models.JobsetV1alpha2JobSet.from_dict(jobset).to_dict())
    odd = {**jobset, "spec": {**jobset["spec"], "replicas": 2}}
    assert not is_part(odd, models.JobsetV1alpha2JobSet.from_dict(odd).to_dict())


def is_part(value: Any, of: Any) -> bool:
    """True if the other value has all that this one has; mappings may have more, such as defaults."""
    if isinstance(value, dict):
        return isinstance(of, dict) and all(key in of and is_part(each, of[key]) for key, each in value.items())
    if isinstance(value, list):
        return isinstance(of, list) and len(of) == len(value) and all(map(is_part, value, of))
    return bool(value == of)


def test_compose_takes_the_file() -> None:
    """By the Compose specification's schema, of check-jsonschema."""
    jsonschema = pytest.importorskip("jsonschema")
    package = pytest.importorskip("check_jsonschema.builtin_schemas", reason="pip install check-jsonschema")
    schema = json.loads((resources.files(package) / "vendor" / "compose-spec.json").read_text())
    jsonschema.validate(compose_file(), schema)
    with pytest.raises(jsonschema.ValidationError, match="restarts"):
        jsonschema.validate({"services": {"seed": {"restarts": "always"}}}, schema)


@pytest.mark.slow  # the import takes seconds
@pytest.mark.parametrize("file", TASKS, ids=lambda file: file.stem)
def test_skypilot_takes_the_task(file: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schemas = pytest.importorskip("sky.utils.schemas", reason="pip install skypilot")
    task = yaml.safe_load(file.read_text())
    jsonschema.validate(task, schemas.get_task_schema())
    jsonschema.validate(task["resources"], schemas.get_resources_schema())
    for mount in task["file_mounts"].values():
        if isinstance(mount, dict):
            jsonschema.validate(mount, schemas.get_storage_schema())


# What the files say


@pytest.mark.parametrize("pod", [*pods()])
def test_a_pod_may_do_nothing_that_it_need_not(pod: Mapping[str, Any]) -> None:
    """It is nobody of importance, writes into volumes alone, and no Service sets variables that stand for flags."""
    (container,) = pod["containers"]
    user, own = pod["securityContext"], container["securityContext"]
    assert user["runAsNonRoot"]
    assert user["seccompProfile"] == {"type": "RuntimeDefault"}
    assert own == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert pod["enableServiceLinks"] is pod["automountServiceAccountToken"] is False
    assert user["fsGroupChangePolicy"] == "OnRootMismatch"  # else the kubelet opens the key to the group
    (secret,) = (each["secret"] for each in pod["volumes"] if "secret" in each)
    assert secret["defaultMode"] == 0o400


def test_only_mistakes_are_not_started_again() -> None:
    (job,) = OBJECTS["JobSet/dmoe-trainers"]["spec"]["replicatedJobs"]
    rules = {rule["action"]: rule for rule in job["template"]["spec"]["podFailurePolicy"]["rules"]}
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    codes = rules["FailJob"]["onExitCodes"]
    assert codes == {"containerName": container["name"], "operator": "In", "values": [2]}
    assert rules["Ignore"]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert job["template"]["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # as a podFailurePolicy demands


def test_the_image_is_made_of_what_is_there() -> None:
    text = (RECIPES / "Dockerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.*) \S+$", text, re.MULTILINE) for word in line.split()]
    assert len(copied) >= 3
    assert all((RECIPES.parent / name).exists() for name in copied)
    _, env = image()
    assert env == {"HOME": "/cache", "TMPDIR": "/cache"}


# Its command lines, read

Called = Callable[[str], list[tuple[Container, list[Any]]]]

_NOTED = """\
printf '%s\\0' "$@" > "$ENGINE_NOTES/$$.words"
env -0 > "$ENGINE_NOTES/$$.env"
"""


def commands(engine: Engine, container: Container) -> list[Any]:
    """The `dmoe` commands that a container starts, as they are read; they are not run."""
    notes = engine.volumes / "notes" / f"{container.name}-{sum(1 for _ in engine.volumes.glob('notes/*'))}"
    notes.mkdir(parents=True)
    script = f'export ENGINE_NOTES={notes}; exec "$@"'
    engine.start([container], ["sh", "-c", script, "sh", *container.argv])
    process = engine.processes[container.name]
    assert process.wait(20) == 0, engine.log_of(container).read_text()
    with contextlib.suppress(ProcessLookupError):  # what it has started beside itself may note its words yet
        for _ in range(2000):
            os.killpg(process.pid, 0)
            time.sleep(0.01)
    found = []
    for file in sorted(notes.glob("*.words")):
        name, *typed = file.read_text().split("\0")[:-1]
        environ = dict(line.split("=", 1) for line in file.with_suffix(".env").read_text().split("\0") if line)
        given = gather(commands_of(Command)[name], typed, environ, name=name)
        parsed = parse_command_line(Command, prog="dmoe", args=[name, *given.words], origins=given.origins)
        found.append(parsed)
    return found


@pytest.fixture(scope="module")
def noting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """An engine whose `dmoe` notes how it was called."""
    with open_engine(tmp_path_factory.mktemp("engine"), dmoe=_NOTED) as engine:
        yield engine


@pytest.fixture(scope="module")
def called(noting: Engine) -> Called:
    """The containers of a recipe with their commands; they are started once for all tests."""
    return cache(lambda recipe: [(each, commands(noting, each)) for each in ALL[recipe]()])


@pytest.mark.parametrize("recipe", ALL)
def test_commands_fit_their_containers(recipe: str, noting: Engine, called: Called) -> None:
    """Their flags are known and go together; they write into volumes alone, and may take as long to leave as the
    engine lets them."""
    seen: dict[str, int] = {}
    for container, its_commands in called(recipe):
        for command in its_commands:
            seen[type(command).__name__] = seen.get(type(command).__name__, 0) + 1
            command._check() if isinstance(command, NodeCommand) else None
            command.check() if isinstance(command, TrainCommand) else None
            leave_s = TRAINER_GRACE_S if isinstance(command, TrainCommand) else command.LEAVE_TIMEOUT_S
            assert leave_s < container.grace_s, container.name
            paths = [Path(flag.value) for flag in flags_of(command) if isinstance(flag.value, Path)]
            outside = [path for path in paths if not path.is_relative_to(noting.volumes)]
            assert paths
            assert not outside, f"{container.name} writes outside its volumes"
            assert Path(noting.environment(container)["HOME"]).is_relative_to(noting.volumes)
    expected = {
        "kubernetes": {"DhtCommand": 2, "NodeCommand": 3, "TrainCommand": 2},
        "compose": {"DhtCommand": 1, "NodeCommand": 3, "TrainCommand": 1},
        "skypilot": {"DhtCommand": 1, "NodeCommand": 3, "TrainCommand": 2},
    }
    assert seen == expected[recipe]


@pytest.mark.parametrize("recipe", ALL)
def test_nodes_have_room_for_all_while_one_is_away(recipe: str, called: Called) -> None:
    found = [command for _, its_commands in called(recipe) for command in its_commands]
    nodes = [command for command in found if isinstance(command, NodeCommand)]
    trainers = [command for command in found if isinstance(command, TrainCommand)]
    uids = {str(uid) for pattern in nodes[0].hand.of for uid in expand_grid_pattern(pattern)}
    assert sum(node.hand.claim for node in nodes[1:]) >= len(uids)
    language = trainers[0].language
    assert uids == {
        f"layer{layer}.{row}.{column}"
        for layer in range(language.num_layers)
        for row in range(language.grid_size[0])
        for column in range(language.grid_size[1])
    }
    assert {node.kind.expert for node in nodes} == {trainer.language.layer for trainer in trainers}
    assert len({trainer.data.data_seed for trainer in trainers}) == len(trainers)


def test_a_run_that_has_begun_is_resumed(noting: Engine) -> None:
    """The same command line begins a run and goes on with it."""
    for container in (*kubernetes()[-1:], *skypilot()[-1:], ALL["compose"]()[-1]):
        (first,) = commands(noting, container)
        assert first.folder.resume is False
        (first.folder.out / "checkpoints").mkdir(parents=True)
        (again,) = commands(noting, container)
        assert again.folder == replace(first.folder, resume=True)
