"""Recipes as their engines read them: each container with its command line, environment, folders, probe and grace.

What an engine expands is expanded here: `$(VAR)` and the downward API of Kubernetes, `${VAR:-default}` of Compose, the
variables of SkyPilot, the image's entry point and environment. Paths and addresses are still those of the container.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml

RECIPES = Path(__file__).parents[2] / "recipes"
NETWORK = f"127.{1 + os.getpid() % 250}.{os.getpid() // 250 % 250}"
"""Begin of the addresses of this process's containers: all of 127.0.0.0/8 is this machine."""
SECRET = "0123456789abcdef0123456789abcdef\n"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """Question that an engine asks a container: an HTTP path, or a command to run in it."""

    path: str = ""
    port: int = 0
    command: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Container:
    """One container, as an engine would start it."""

    name: str
    role: str
    """Its set, service or task."""
    argv: tuple[str, ...]
    env: Mapping[str, str]
    ip: str
    names: tuple[str, ...] = ()
    """Names under which others reach it."""
    volumes: Mapping[str, str] = field(default_factory=dict)
    """Folder in the container -> name of its volume, which containers may share."""
    secrets: tuple[str, ...] = ()
    """Files in the container that hold the swarm's secret."""
    ready: Probe
    grace_s: float
    """Seconds between SIGTERM and SIGKILL."""


def documents(folder: Path) -> list[dict[str, Any]]:
    """All objects in the YAML files of a folder."""
    return [each for file in sorted(folder.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text()) if each]


def image() -> tuple[list[str], dict[str, str]]:
    """Entry point and environment of the image."""
    text = (RECIPES / "Dockerfile").read_text()
    entry = re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)
    variables = re.search(r"^ENV (.*)$", text, re.MULTILINE)
    assert entry is not None
    assert variables is not None
    return json.loads(entry[1]), dict(each.split("=") for each in variables[1].split())


# Kubernetes


def kubernetes() -> list[Container]:
    """Containers of the StatefulSets and of the JobSet."""
    objects = documents(RECIPES / "kubernetes")
    maps = {each["metadata"]["name"]: each["data"] for each in objects if each["kind"] == "ConfigMap"}
    return [
        _of_pod(pod, maps, f"{NETWORK}.{number}")
        for number, pod in enumerate([*_stateful_pods(objects), *_job_pods(objects)], start=1)
    ]


@dataclass(frozen=True, kw_only=True)
class _Pod:
    name: str
    names: tuple[str, ...]
    template: Mapping[str, Any]
    claims: Mapping[str, str] = field(default_factory=dict)
    last_env: Mapping[str, str] = field(default_factory=dict)
    """Variables that the controller puts behind the container's own, so that `$(VAR)` in these does not see them."""


def _stateful_pods(objects: Sequence[Mapping[str, Any]]) -> Iterator[_Pod]:
    services = {each["metadata"]["name"]: each for each in objects if each["kind"] == "Service"}
    for each in objects:
        if each["kind"] != "StatefulSet":
            continue
        spec, set_name = each["spec"], each["metadata"]["name"]
        service, labels = services[spec["serviceName"]]["spec"], spec["template"]["metadata"]["labels"]
        assert service["clusterIP"] == "None", "pods have no names"
        assert service["selector"].items() <= labels.items()
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        for ordinal in range(spec["replicas"]):
            name = f"{set_name}-{ordinal}"
            claims = {claim["metadata"]["name"]: f"{claim['metadata']['name']}-{name}" for claim in _claims(spec)}
            yield _Pod(name=name, names=(f"{name}.{spec['serviceName']}",), template=spec["template"], claims=claims)


def _claims(spec: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    found: Sequence[Mapping[str, Any]] = spec.get("volumeClaimTemplates", ())
    return found


def _job_pods(objects: Sequence[Mapping[str, Any]]) -> Iterator[_Pod]:
    for each in objects:
        for job in each["spec"]["replicatedJobs"] if each["kind"] == "JobSet" else ():
            spec, set_name = job["template"]["spec"], each["metadata"]["name"]
            for replica in range(job["replicas"]):
                for index in range(spec["completions"]):
                    name = f"{set_name}-{job['name']}-{replica}-{index}"
                    last = {"JOB_COMPLETION_INDEX": str(index)}
                    yield _Pod(name=name, names=(f"{name}.{set_name}",), template=spec["template"], last_env=last)


def _of_pod(pod: _Pod, maps: Mapping[str, Mapping[str, str]], ip: str) -> Container:
    spec = pod.template["spec"]
    (container,) = spec["containers"]
    facts = {"metadata.name": pod.name, "status.podIP": ip}
    entry, env = image()
    for source in container.get("envFrom", ()):
        env |= maps[source["configMapRef"]["name"]]
    own: dict[str, str] = {}
    for each in container.get("env", ()):
        named = facts[each["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in each else each["value"]
        own[each["name"]] = _dollars(named, own)  # what stands before, in the container's own list alone
    env |= own | pod.last_env
    words = [*container.get("command", entry), *container.get("args", ())]
    by_name = {each["name"]: each for each in spec["volumes"]}
    volumes, secrets = {}, []
    for mount in container["volumeMounts"]:
        volume = by_name.get(mount["name"], {})
        if "secret" in volume:
            secrets.append(f"{mount['mountPath']}/swarm")  # its only key, as README.md makes it
            volumes[mount["mountPath"]] = f"{mount['name']}-{pod.name}"
        elif "persistentVolumeClaim" in volume:
            volumes[mount["mountPath"]] = volume["persistentVolumeClaim"]["claimName"]
        else:
            volumes[mount["mountPath"]] = pod.claims.get(mount["name"], f"{mount['name']}-{pod.name}")
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    probe = container["readinessProbe"]["httpGet"]
    return Container(
        name=pod.name,
        role=container["name"],
        argv=tuple(_dollars(word, env) for word in words),
        env=env,
        ip=ip,
        names=pod.names,
        volumes=volumes,
        secrets=tuple(secrets),
        ready=Probe(path=probe["path"], port=ports[probe["port"]]),
        grace_s=spec["terminationGracePeriodSeconds"],
    )


def _dollars(text: str, env: Mapping[str, str]) -> str:
    """Text with `$(VAR)` expanded; unknown ones stay."""
    return re.sub(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)", lambda found: env.get(found[1], found[0]), text)


# Compose


def compose() -> list[Container]:
    """Containers of all services."""
    services = compose_file()["services"]
    each_once = [(name, spec) for name, spec in services.items() for _ in range(_replicas(spec))]
    return [_of_service(name, spec, number) for number, (name, spec) in enumerate(each_once, start=1)]


def compose_file() -> dict[str, Any]:
    """The file with its variables expanded, none of which is set."""

    def expanded(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: expanded(each) for key, each in value.items()}
        if isinstance(value, list):
            return [expanded(each) for each in value]
        pattern = r"\$\$|\$\{(\w+):-([^}]*)\}"
        return re.sub(pattern, lambda found: found[2] or "$", value) if isinstance(value, str) else value

    found: dict[str, Any] = expanded(yaml.safe_load((RECIPES / "compose" / "compose.yaml").read_text()))
    return found


def _replicas(spec: Mapping[str, Any]) -> int:
    return int(spec.get("deploy", {}).get("replicas", 1))


def _of_service(service: str, spec: Mapping[str, Any], number: int) -> Container:
    entry, env = image()
    host = f"{number:012x}"  # the container's id, which Docker gives as its name
    kind, *command = spec["healthcheck"]["test"]
    assert kind == "CMD"
    mounts = [each.split(":") for each in spec["volumes"]]
    return Container(
        name=f"{service}-{number}",
        role=service,
        argv=(*spec.get("entrypoint", entry), *spec["command"]),
        env=env | spec["environment"] | {"HOSTNAME": host},
        ip=f"{NETWORK}.{number}",
        names=(service, host),
        volumes={folder: volume for volume, folder in mounts} | {"/run/secrets": f"secrets-{service}-{number}"},
        secrets=tuple(f"/run/secrets/{name}" for name in spec["secrets"]),
        ready=Probe(command=tuple(command)),
        grace_s=seconds(spec["stop_grace_period"]),
    )


def seconds(text: str) -> float:
    """Seconds of a duration such as 2m or 10s."""
    return float(text[:-1]) * {"s": 1, "m": 60}[text[-1]]


# SkyPilot


def skypilot() -> list[Container]:
    """The machines of swarm.yaml, and those of two trainers, each a job of its own."""
    swarm = yaml.safe_load((RECIPES / "skypilot" / "swarm.yaml").read_text())
    trainer = yaml.safe_load((RECIPES / "skypilot" / "trainer.yaml").read_text())
    ips = [f"{NETWORK}.{number}" for number in range(1, swarm["num_nodes"] + 1)]
    nodes = [_of_task(swarm, "swarm", ips, rank, job="1") for rank in range(len(ips))]
    join = {"DMOE_JOIN": f"{ips[0]}:31337"}  # as README.md says
    ours = [f"{NETWORK}.{len(ips) + number}" for number in (1, 2)]
    return [*nodes, *(_of_task(trainer, "trainer", [ip], 0, job=ip[-1], given=join) for ip in ours)]


_NOTHING: Mapping[str, str] = MappingProxyType({})


def _of_task(
    task: Mapping[str, Any], role: str, ips: Sequence[str], rank: int, *, job: str, given: Mapping[str, str] = _NOTHING
) -> Container:
    envs = {key: value for key, value in task["envs"].items() if value is not None} | given | {"BUCKET": "mine"}
    assert envs.keys() == task["envs"].keys(), "the caller gives no more than what the task lacks"
    native = {
        "SKYPILOT_NODE_IPS": "\n".join(ips),
        "SKYPILOT_NODE_RANK": str(rank),
        "SKYPILOT_NUM_NODES": str(len(ips)),
        "SKYPILOT_TASK_ID": f"sky-managed-2026-11-30_{task['name']}_{job}-0",
    }
    name = f"{task['name']}-{job}-{rank}"
    mounts = {folder: source for folder, source in task["file_mounts"].items() if isinstance(source, dict)}
    return Container(
        name=name,
        role=role,
        argv=("bash", "-c", task["run"]),
        env=envs | native | {"HOME": "/home/sky"},
        ip=ips[rank],
        volumes={"/home/sky": f"home-{name}", **dict.fromkeys(mounts, f"bucket-{role}")},
        secrets=("/home/sky/swarm.secret",),
        ready=Probe(path="/readyz", port=9100),
        grace_s=90.0,  # systemd's, when a machine is shut down: the file does not say
    )


ALL: Mapping[str, Callable[[], list[Container]]] = {"kubernetes": kubernetes, "compose": compose, "skypilot": skypilot}
"""Recipe -> its containers."""
