"""The app of Ray Serve: replicas of the OpenAI server, a front before several of them, and servers that work for them.

build_app ---- Front (reads bodies, chooses a replica) ---- Server (replicas: API and engine)
                                                              |  asks for addresses
                                              Prefill, Encoder (engines that work for them) -- Addresses
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vlmserve.ray.service.plan import Bundle, Plan, Role, read_plan
from vlmserve_common.errors import SettingsError
from vlmserve_common.installing import install
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from ray.serve import Application

_NAMES: Mapping[Role, str] = {"all": "Server", "decode": "Server", "prefill": "Prefill", "encode": "Encoder"}
_HEALTH_S, _HEALTH_TIMEOUT_S = 5.0, 30.0
_DRAIN_LOOK_S = 0.5
_METRICS_S, _LOOK_BACK_S = 2.0, 6.0
_ROUTING_S = 1.0


def build_app(args: dict[str, Any]) -> Application:
    """Build the app, for `serve.run` or the import_path of a Serve config.

    args: settings by name, with dashes or underscores: those of `vlmserve deploy` (replicas, max-replicas ...), and
    those of `vlmserve serve` (model, tp-size ...). Raises SettingsError with a line for each problem.
    """
    return app_of(read_plan(args))


def app_of(plan: Plan) -> Application:
    """Build the app of a plan."""
    check_ray()
    import ray

    bundles = plan.bundles(cluster_has_gpus=ray.is_initialized() and ray.cluster_resources().get("GPU", 0) > 0)
    engine = plan.settings.engine
    if plan.worker_roles and engine.peer_key is None:  # they listen to the network
        engine = replace(engine, peer_key=secrets.token_urlsafe(32))
    plan = replace(plan, settings=replace(plan.settings, engine=engine))
    known, workers = [], []
    if plan.worker_roles:
        known = [_addresses()]
        workers = [
            _server(plan, role, count, bundles).bind(_told(plan, role, bundles), *known)
            for role, count in plan.worker_roles.items()
        ]
    server = _server(plan, plan.answering_role, plan.deployment.replicas, bundles)
    bound = server.bind(_told(plan, plan.answering_role, bundles), *known, *workers)
    if not plan.has_front:
        return bound
    return _front(plan).bind(plan.settings, bound)


def check_ray() -> None:
    """Raise SettingsError, with the command that installs it, if Ray Serve is missing."""
    try:
        import ray.serve  # noqa: F401
    except ImportError as error:
        raise SettingsError(f"Ray Serve is not installed ({error}); run: {install('cluster')}") from None


def _told(plan: Plan, role: Role, bundles: list[Bundle]) -> Any:
    from vlmserve.ray.service.replica import ReplicaPlan

    return ReplicaPlan(
        version=__version__,
        settings=plan.role_settings(role),
        workers=plan.worker_roles,
        slots=plan.slots,
        target_use=plan.deployment.target_use,
        bundles=bundles,
    )


def _server(plan: Plan, role: Role, count: int, bundles: list[Bundle]) -> Any:
    """Return the deployment of a role's replicas."""
    from ray import serve

    from vlmserve.ray.service.replica import DeployedServer, IngressServer, make_through

    own, deployment = bundles[0], plan.deployment
    options: dict[str, Any] = {
        "name": _NAMES[role],
        "max_ongoing_requests": plan.max_ongoing,
        "ray_actor_options": {"num_cpus": own["CPU"], "num_gpus": own.get("GPU", 0)},
        "graceful_shutdown_timeout_s": plan.shutdown_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_S,
        "health_check_period_s": _HEALTH_S,
        "health_check_timeout_s": _HEALTH_TIMEOUT_S,
        "num_replicas": count,
        "logging_config": {"enable_access_log": plan.settings.access_log},
    }
    if len(bundles) > 1:
        options |= {"placement_group_bundles": bundles, "placement_group_strategy": "STRICT_SPREAD"}
    if role in ("prefill", "encode"):
        return _deployment(DeployedServer, options)
    if deployment.max_replicas is not None:
        del options["num_replicas"]
        options["autoscaling_config"] = {
            "min_replicas": deployment.replicas,
            "max_replicas": deployment.max_replicas,
            "upscale_delay_s": deployment.upscale_delay_s,
            "downscale_delay_s": deployment.downscale_delay_s,
            "metrics_interval_s": _METRICS_S,
            "look_back_period_s": _LOOK_BACK_S,
            "policy": {"policy_function": "vlmserve.ray.service.scaling:by_use"},
        }
    if not plan.has_front:
        return _deployment(serve.ingress(make_through)(IngressServer), options)
    options["request_router_config"] = {
        "request_router_class": "vlmserve.ray.service.routing:AffinityRouter",
        "request_router_kwargs": {"method": plan.settings.engine.load_balance_method},
        "request_routing_stats_period_s": _ROUTING_S,
    }
    return _deployment(DeployedServer, options)


def _front(plan: Plan) -> Any:
    from ray import serve

    from vlmserve.ray.service.front import Front
    from vlmserve.ray.service.replica import make_through

    options: dict[str, Any] = {
        "name": "Front",
        "num_replicas": plan.deployment.fronts,
        "max_ongoing_requests": plan.settings.max_connections,
        "logging_config": {"enable_access_log": plan.settings.access_log},
        "ray_actor_options": {"num_cpus": 0},
        "graceful_shutdown_timeout_s": plan.shutdown_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_LOOK_S,
    }
    return _deployment(serve.ingress(make_through)(Front), options)


def _addresses() -> Any:
    from vlmserve.ray.service.addresses import Addresses

    quiet = {"enable_access_log": False}
    options = {"name": "Addresses", "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}, "logging_config": quiet}
    return _deployment(Addresses, options).bind()


def _deployment(cls: type, options: dict[str, Any]) -> Any:
    from ray import serve

    make: Any = serve.deployment  # whose types say nothing of a class without options
    return make(cls).options(**options)
