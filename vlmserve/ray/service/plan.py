"""What is deployed: a server's settings, how many replicas there are of it, and the resources of each."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vlmserve.config.checks import type_problems
from vlmserve.config.fields import ABOVE_0, AT_LEAST_0, AT_LEAST_1, SECONDS, Allowed, flag, range_problems, settings_of
from vlmserve.config.settings import ServerSettings, load_settings
from vlmserve_common.errors import SettingsError

Role: TypeAlias = Literal["all", "encode", "prefill", "decode"]
Bundle: TypeAlias = dict[str, float]
"""Resources of one machine, by Ray's names."""

_deployment = settings_of("deployment")
_FRACTION = Allowed(words="above 0 and at most 1", holds=lambda value: 0 < value <= 1)
# Serve's requests to a replica besides those that the engine computes or lets wait: files, models, health.
_OTHER_REQUESTS = 64
# The end of a replica besides running requests: closing files, saving caches, ending processes.
_ENDING_S = 20.0
# Settings that are the deployment's business: each has one value here.
_OWN = {"role": "all", "node_rank": 0, "dist_init_addr": "found-by-ray:1", "prefill_urls": None, "encoder_urls": None}


@dataclass(frozen=True, kw_only=True)
class Deployment:
    """How many replicas there are, and what each reserves. The fields are flags of `vlmserve deploy`."""

    name: str = _deployment("vlmserve", "the app's name in the cluster")
    replicas: int = _deployment(1, "replicas of the model; with --max-replicas, the fewest", AT_LEAST_1)
    max_replicas: int | None = _deployment(
        None, "most replicas; Serve adds some while requests wait or KV caches fill, and removes idle ones", AT_LEAST_1
    )
    target_use: float = _deployment(
        0.8, "with --max-replicas: the part of a replica's KV cache and requests that is to be in use", _FRACTION
    )
    upscale_delay_s: float = _deployment(30.0, "seconds of too much work until replicas are added", SECONDS)
    downscale_delay_s: float = _deployment(600.0, "seconds of too little work until replicas are removed", SECONDS)
    front: Literal["auto", "on", "off"] = _deployment(
        "auto",
        "a deployment that sends each request to the replica with the same beginning or pictures; off: Serve's proxies "
        "choose, and know no prompts; auto: on with several replicas",
    )
    fronts: int = _deployment(1, "replicas of the front; it has no model", AT_LEAST_1)
    cpus: float = _deployment(1.0, "CPUs that a replica reserves on each of its machines", ABOVE_0)
    gpus: float | None = _deployment(
        None,
        "GPUs that a replica reserves on each of its machines; default: one for each rank, or none without GPUs",
        Allowed(words="0 or more", holds=lambda value: value >= 0),
    )
    prefill_replicas: int = _deployment(0, "servers that compute prompts for the replicas (--role prefill)", AT_LEAST_0)
    encode_replicas: int = _deployment(0, "servers that encode pictures for the replicas (--role encode)", AT_LEAST_0)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A deployment of a server. settings: of each replica, but for its role and addresses."""

    deployment: Deployment
    settings: ServerSettings

    @property
    def several(self) -> bool:
        """Return True if there may be several replicas."""
        return max(self.deployment.replicas, self.deployment.max_replicas or 1) > 1

    @property
    def has_front(self) -> bool:
        """Return True if requests go through a front."""
        return self.deployment.front == "on" or (self.deployment.front == "auto" and self.several)

    @property
    def max_ongoing(self) -> int:
        """Return the most requests that Serve may send to a replica. The replica itself refuses those above its limits,
        as a server alone does."""
        args = self.settings.engine
        return args.dp_size * (args.max_running_requests + args.max_queued_requests) + _OTHER_REQUESTS

    @property
    def shutdown_s(self) -> float:
        """Return the seconds that Serve gives a replica to end."""
        return self.settings.shutdown_timeout_s + _ENDING_S

    @property
    def slots(self) -> int:
        """Return the requests that a replica computes together."""
        return self.settings.engine.dp_size * self.settings.engine.max_running_requests

    def role_settings(self, role: Role) -> ServerSettings:
        """Return the settings of the replicas of a role."""
        return replace(self.settings, engine=replace(self.settings.engine, role=role))

    def bundles(self, *, cluster_has_gpus: bool) -> list[Bundle]:
        """Return what a replica reserves on each of its machines."""
        args, gpus = self.settings.engine, self.deployment.gpus
        if gpus is None:
            wanted = args.device.startswith("cuda") or (args.device == "auto" and cluster_has_gpus)
            gpus = float(len(args.own_ranks) * args.num_replicas) if wanted else 0.0
        bundle = {"CPU": self.deployment.cpus} | ({"GPU": gpus} if gpus else {})
        return [bundle] * args.nnodes

    @property
    def worker_roles(self) -> dict[Role, int]:
        """Return the roles that work for the replicas, and how many servers there are of each."""
        found: dict[Role, int] = {
            "prefill": self.deployment.prefill_replicas,
            "encode": self.deployment.encode_replicas,
        }
        return {role: count for role, count in found.items() if count}

    @property
    def answering_role(self) -> Role:
        """Return the role of the replicas that answer."""
        return "decode" if self.deployment.prefill_replicas else "all"


def read_plan(given: Mapping[str, Any]) -> Plan:
    """Return the plan of settings by name, with dashes or underscores: those of `Deployment`, and those of `vlmserve
    serve`. Raises SettingsError with a line for each problem."""
    values = {str(name).replace("-", "_"): value for name, value in given.items()}
    own = {field.name: values.pop(field.name) for field in dataclasses.fields(Deployment) if field.name in values}
    config = values.pop("config", None)
    deployment = Deployment(**own)
    problems = type_problems(deployment, flag) or range_problems(deployment)
    if problems:
        raise SettingsError("\n".join(problems))
    settings = load_settings(values, config=config, defaults={"dist_init_addr": _OWN["dist_init_addr"]})
    plan = Plan(deployment=deployment, settings=_anywhere(settings))
    problems = list(_problems(plan))
    if problems:
        raise SettingsError("\n".join(problems))
    return plan


def _anywhere(settings: ServerSettings) -> ServerSettings:
    """Return settings with the model's folder as an absolute path, as replicas work in other folders."""
    model = Path(settings.engine.model).expanduser()
    if not settings.engine.model or not model.is_dir():
        return settings
    engine = replace(settings.engine, model=str(model.resolve()))
    return replace(settings, engine=engine, served_model_name=settings.served_model_name or settings.engine.model)


def _problems(plan: Plan) -> list[str]:
    deployment, settings = plan.deployment, plan.settings
    problems = []
    for name, value in _OWN.items():
        if getattr(settings.engine, name) != value:
            hint = "" if name != "role" else "; use --prefill-replicas and --encode-replicas"
            problems.append(f"{flag(name)} is set for each server by its deployment; leave it out{hint}")
    if deployment.max_replicas is not None and deployment.max_replicas < deployment.replicas:
        problems.append(
            f"--max-replicas is {deployment.max_replicas}; it must be at least --replicas, which is "
            f"{deployment.replicas}"
        )
    keeps = settings.database_url is None and (
        settings.max_files or settings.max_batches or settings.max_stored_responses
    )
    if plan.several and not plan.has_front and keeps:
        problems.append(
            "--front is 'off'; with several replicas it must be on, as files, batches and stored responses are at one "
            "of them (or set --database-url, or --max-files, --max-batches and --max-stored-responses to 0)"
        )
    return problems


def lacking(nodes: Sequence[Mapping[str, float]], plan: Plan, bundles: Sequence[Bundle]) -> str | None:
    """Return what a cluster lacks for the plan's replicas, in one line; None if there is enough.

    nodes: the resources of each node. Each bundle goes to one node; those of one replica go to different nodes.
    """
    free = [dict(node) for node in nodes]
    replicas = plan.deployment.replicas + sum(plan.worker_roles.values())
    for number in range(replicas):
        taken: list[dict[str, float]] = []
        for bundle in bundles:
            fits = [node for node in free if not any(node is one for one in taken) and _fits(bundle, node)]
            if not fits:
                what = " and ".join(f"{count:g} {name}" for name, count in bundle.items())
                where = "on a node" if len(bundles) == 1 else f"on each of {len(bundles)} nodes (--nnodes)"
                has = "; ".join(", ".join(f"{node.get(name, 0):g} {name}" for name in bundle) for node in nodes)
                return (
                    f"the cluster has no room for replica {number + 1} of {replicas}: each needs {what} {where}, and "
                    f"its nodes have {has or 'nothing'}"
                )
            node = max(fits, key=lambda one: (one.get("GPU", 0.0), one.get("CPU", 0.0)))
            taken.append(node)
            for name, count in bundle.items():
                node[name] -= count
    return None


def _fits(bundle: Bundle, node: Mapping[str, float]) -> bool:
    return all(node.get(name, 0.0) >= count for name, count in bundle.items())
