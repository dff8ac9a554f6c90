"""A Ray cluster of two nodes on this machine, with apps of the built-in model."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import ray
from ray import serve
from ray.cluster_utils import Cluster

from tests.ports import free_port
from tests.vlmserve.server_process import ROOT
from vlmserve.commands.bench.processes import children_of
from vlmserve.ray import build_app

NAME = "vlmserve"
SMALL = {"num-threads": 1, "max-total-tokens": 8192, "media-processes": 1, "log-level": "warning", "cpus": 0.5}
PATIENT_S = 240.0
"""How long something of Ray may take on a busy machine of two cores."""
OURS = ("scheduler", "detokenizer", "encoder", "media-0", "rank-1")


class OnRay:
    """The cluster, and the one app on it. url: of Serve's proxy."""

    def __init__(self) -> None:
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        os.environ.update(
            PYTHONPATH=path,
            RAY_memory_monitor_refresh_ms="0",
            RAY_USAGE_STATS_ENABLED="0",
            RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S=str(PATIENT_S),
            RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S=str(PATIENT_S),
        )
        self._others = children_of(os.getpid())  # a server that other tests share, which may still be starting
        self._cluster = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False}, shutdown_at_exit=False
        )
        self._cluster.add_node(num_cpus=4)
        ray.init(address=self._cluster.address, log_to_driver=True)
        port = free_port()
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        self.url = f"http://127.0.0.1:{port}"

    def close(self) -> None:
        """End the cluster."""
        serve.shutdown()
        ray.shutdown()
        self._cluster.shutdown()

    def deploy(self, **settings: Any) -> None:
        """Deploy the app, or change it."""
        given = {name.replace("_", "-"): value for name, value in settings.items()}
        serve.run(build_app({**SMALL, **given}), name=NAME, route_prefix="/")

    def delete(self) -> None:
        """Delete the app, and wait until nothing is left of it."""
        serve.delete(NAME)
        await_that(lambda: not self.processes(*OURS, "ray::ServeReplica"))

    def client(self, **options: Any) -> openai.OpenAI:
        """Return a client that tries everything once."""
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=PATIENT_S, **options)

    def running(self, deployment: str = "Server") -> int:
        """Return how many replicas of a deployment run."""
        app = serve.status().applications.get(NAME)
        found = app.deployments.get(deployment) if app is not None else None
        return found.replica_states.get("RUNNING", 0) if found is not None else 0

    def processes(self, *names: str) -> list[int]:
        """Return the processes of the cluster whose names begin with any of these."""
        while True:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # one ended under way: look again
                others = {
                    pid
                    for other in self._others
                    if os.path.exists(f"/proc/{other}")
                    for pid in (other, *children_of(other))
                }
                return [pid for pid in children_of(os.getpid()) if pid not in others and name_of(pid).startswith(names)]


def name_of(pid: int) -> str:
    """Return what a process calls itself; "" if it has ended."""
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].decode()
        return title if title.startswith("ray::") else Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def await_that(holds: Callable[[], object], seconds: float = PATIENT_S) -> None:
    """Wait until something holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, "it did not come true"
        time.sleep(0.1)


class Load:
    """Clients that ask one question after the other until `stop`, half of them for streams.

    outcomes: "ok", or the status of an error, or the code of an error event, and how often each came.
    """

    def __init__(self, on_ray: OnRay, clients: int = 6, tokens: int = 48) -> None:
        self.outcomes: Counter[str] = Counter()
        self._on_ray = on_ray
        self._tokens = tokens
        self._over = threading.Event()
        self._threads = [threading.Thread(target=self._ask_on, args=(number,)) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> Counter[str]:
        """Wait for the last answers; return all outcomes."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        return self.outcomes

    def await_more(self, count: int) -> None:
        """Wait until so many more requests were answered."""
        aim = self.outcomes["ok"] + count
        await_that(lambda: self.outcomes["ok"] >= aim)

    def _ask_on(self, number: int) -> None:
        client, count = self._on_ray.client(), 0
        while not self._over.is_set():
            count += 1
            try:
                text = self._ask(client, f"{number}.{count}: what is on the picture?", stream=bool(number % 2))
                self.outcomes["ok" if text else "empty"] += 1
            except openai.APIStatusError as error:
                self.outcomes[str(error.status_code)] += 1
            except openai.APIError as error:
                self.outcomes[str(error.code or type(error).__name__)] += 1

    def _ask(self, client: openai.OpenAI, question: str, *, stream: bool) -> str:
        extra = {"ignore_eos": True}
        asked: dict[str, Any] = {
            "model": "vlmserve-default",
            "messages": [{"role": "user", "content": question}],
            "max_tokens": self._tokens,
            "extra_body": extra,
        }
        if not stream:
            return client.chat.completions.create(**asked).choices[0].message.content or ""
        parts = client.chat.completions.create(**asked, stream=True)
        chunks = [chunk.choices[0] for chunk in parts if chunk.choices]
        assert chunks[-1].finish_reason == "length"
        return "".join(chunk.delta.content or "" for chunk in chunks)


@contextlib.contextmanager
def a_cluster() -> Iterator[OnRay]:
    """Start a cluster, and end it."""
    on_ray = OnRay()
    try:
        yield on_ray
    finally:
        on_ray.close()
