"""`vlmserve deploy`: prints the config of an app of Ray Serve, or runs the app on a cluster."""

from __future__ import annotations

import argparse
import dataclasses
import logging
import threading
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_type_hints

from vlmserve.config.fields import flag
from vlmserve.config.flags import GIVEN_AS, CommandParser, add_settings, in_the_users_words
from vlmserve.ray.cluster import HERE, OWN, Cluster
from vlmserve.ray.service.plan import Deployment, Plan, lacking, read_plan
from vlmserve.ray.service.ports import free_port
from vlmserve_common.errors import EngineError, SettingsError
from vlmserve_common.process.stop_signals import StopRequested, stop_signals_raise
from vlmserve_common.transport.addresses import is_loopback

logger = logging.getLogger(__name__)

_ABOUT = """\
Deploy a model on a Ray cluster: the OpenAI server as an app of Ray Serve (docs/ray.md).

Without --run, the app's config is printed: `serve deploy FILE` gives it to a cluster. With --run, the app runs until
Ctrl-C or SIGTERM. All settings of `vlmserve serve` are taken, too.
"""
_EPILOG = """\
examples:
  vlmserve deploy Qwen/Qwen3-VL-8B-Instruct --replicas 2 > app.yaml        then: serve deploy app.yaml
  vlmserve deploy Qwen/Qwen3-VL-8B-Instruct --replicas 1 --max-replicas 4 --run
  vlmserve deploy Qwen/Qwen3-VL-235B-A22B-Instruct --tp-size 16 --nnodes 2 --run --address HEAD:6379
  vlmserve deploy --run --address local                                    try it on this machine
"""
# They are no part of a config that is printed.
_SECRETS = ("api_key", "admin_api_key", "peer_key")
_NOT_IN_A_CONFIG = (*_SECRETS, "host", "port", "port_file")


def main(argv: Sequence[str]) -> int:
    """Print the config, or run the app; return the exit status. Raises VlmserveError for what cannot be."""
    args = vars(_parser().parse_args(argv))
    run, address, given_as = args.pop("run"), args.pop("address"), args.pop(GIVEN_AS, {})
    given = {name: value for name, value in args.items() if value is not None}
    if (model := given.pop("model_argument", None)) is not None:
        given.setdefault("model", model)
    try:
        plan = read_plan(given)
    except SettingsError as error:
        words = [in_the_users_words(problem, given_as) for problem in str(error).splitlines()]
        raise SettingsError("\n".join(words)) from None
    if run:
        return run_app(plan, address)
    print(config_text(plan, given), end="")
    return 0


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="vlmserve deploy", description=_ABOUT, epilog=_EPILOG, usage="%(prog)s [MODEL] [options]"
    )
    parser.add_argument("model_argument", metavar="MODEL", nargs="?", help="checkpoint folder, or a hub id")
    parser.add_argument("--run", action="store_true", help="run the app, instead of printing its config")
    text = "with --run: the cluster, HOST:PORT; local: one of this machine alone, which ends with the command"
    parser.add_argument("--address", default=HERE, metavar="ADDRESS", help=f"{text} [default: {HERE}, the one here]")
    group = parser.add_argument_group("deployment")
    hints = get_type_hints(Deployment)
    for field in dataclasses.fields(Deployment):
        kinds = [kind for kind in typing.get_args(hints[field.name]) or (hints[field.name],) if kind is not type(None)]
        choices = typing.get_args(hints[field.name]) if isinstance(kinds[0], str) else None
        group.add_argument(
            flag(field.name),
            type=str if choices else kinds[0],
            choices=choices,
            default=argparse.SUPPRESS,
            metavar=None if choices else {int: "N", float: "X"}.get(kinds[0], "TEXT"),
            help=field.metadata["help"] + ("" if field.default is None else f" [default: {field.default}]"),
        )
    add_settings(parser)
    return parser


def config_text(plan: Plan, given: Mapping[str, Any]) -> str:
    """Return a Serve config as YAML. given: the settings, as they are to be in it. Secrets are left out."""
    import yaml

    http = plan.settings
    args = {name.replace("_", "-"): value for name, value in given.items() if name not in _NOT_IN_A_CONFIG}
    if http.engine.model:
        args["model"] = http.engine.model
    content = {
        "proxy_location": "EveryNode",
        "http_options": {"host": http.host, "port": http.port},
        "logging_config": {"enable_access_log": http.access_log},
        "applications": [
            {
                "name": plan.deployment.name,
                "route_prefix": "/",
                "import_path": "vlmserve.ray:build_app",
                "args": args,
            }
        ],
    }
    secrets = [f"VLMSERVE_{name.upper()}" for name in _SECRETS if name in given]
    note = f"# Set {' and '.join(secrets)} on the nodes: a config is no place for keys.\n" if secrets else ""
    return note + yaml.safe_dump(content, sort_keys=False)


def run_app(plan: Plan, address: str) -> int:
    """Run the app on a cluster until a signal; return the exit status."""
    from vlmserve.ray.service.app import app_of, check_ray

    check_ray()
    from ray import serve

    from vlmserve.api.api_keys import read_api_keys

    name, http = plan.deployment.name, plan.settings
    if read_api_keys(http) is None and not is_loopback(http.host):
        logger.warning(
            "--host is %s, and there is no API key: everyone who reaches this address may use the app; set "
            "VLMSERVE_API_KEY or --api-key-file",
            http.host,
        )
    cluster = Cluster(address, setting="--address")
    try:
        with stop_signals_raise():  # from here on, for Ray has handlers of its own
            bundles = plan.bundles(cluster_has_gpus=cluster.has("GPU"))
            if (problem := lacking([node.resources for node in cluster.nodes], plan, bundles)) is not None:
                raise SettingsError(f"{problem} (on a cluster that grows: serve deploy, with the printed config)")
            port = http.port or free_port()
            serve.start(
                proxy_location="EveryNode",
                http_options={"host": http.host, "port": port},
                logging_config={"enable_access_log": http.access_log},
            )
            try:
                serve.run(app_of(plan), name=name, route_prefix="/")
                print(f"ready: http://{http.host}:{port} (Ctrl-C stops it)", flush=True)
                if http.port_file:
                    Path(http.port_file).write_text(f"{port}\n")
                threading.Event().wait()
            except RuntimeError as error:
                raise EngineError(reason_of(serve.status(), name) or str(error)) from None
            finally:
                serve.delete(name)
                if address == OWN:
                    serve.shutdown()
    except StopRequested as stop:
        print(f"stopped by {stop}", flush=True)
    finally:
        cluster.close()
    return 0


def reason_of(status: Any, name: str) -> str | None:
    """Return why an app could not be deployed, in the words of its replicas. status: Serve's."""
    app = status.applications.get(name)
    messages = [one.message for one in app.deployments.values()] if app is not None else []
    for message in messages:
        for line in reversed(message.splitlines()):
            kind, _, what = line.partition(": ")
            if kind.startswith("vlmserve_common.errors.") and what:
                return what
    return None
