"""Apps of several parts on a real cluster: roles, replicas of two nodes, and a model that is not there."""

from __future__ import annotations

import os
import signal
import urllib.request
from collections.abc import Iterator

import pytest
from ray import serve

from tests.vlmserve.ray.service.on_ray import NAME, OnRay, a_cluster, await_that
from tests.vlmserve.server_process import SAMPLES, data_url
from vlmserve.ray.service.deploy import reason_of

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def on_ray() -> Iterator[OnRay]:
    with a_cluster() as cluster:
        yield cluster


def answer(on_ray: OnRay) -> str:
    """Ask about a picture, and return the answer."""
    picture = {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "shapes.png")}}
    asked = [{"type": "text", "text": "What is on this picture?"}, picture, {"type": "text", "text": "Say it."}]
    messages = [{"role": "user", "content": asked}]
    made = on_ray.client().chat.completions.create(
        model="vlmserve-default", messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
    )
    assert made.usage is not None
    assert made.usage.completion_tokens == 8
    return made.choices[0].message.content or ""


def figure(on_ray: OnRay, name: str) -> float:
    """Return a figure of the only replica."""
    page = urllib.request.urlopen(f"{on_ray.url}/metrics").read().decode()
    return next(float(line.split()[1]) for line in page.splitlines() if line.startswith(f"vlmserve:{name}{{"))


def test_prompts_and_pictures_are_computed_by_others(on_ray: OnRay) -> None:
    on_ray.deploy(prefill_replicas=1, encode_replicas=1)
    assert answer(on_ray)
    assert figure(on_ray, "remote_prompts_total") == 1
    on_ray.delete()


def test_a_replica_of_two_nodes_is_replaced_when_a_rank_dies(on_ray: OnRay) -> None:
    on_ray.deploy(pp_size=2, nnodes=2)
    before = answer(on_ray)
    [rank] = on_ray.processes("rank-1")
    os.kill(rank, signal.SIGKILL)
    await_that(lambda: on_ray.processes("rank-1") not in ([], [rank]) and on_ray.running() == 1)
    assert answer(on_ray) == before
    on_ray.delete()


def test_why_an_app_does_not_start_is_said_in_a_line(on_ray: OnRay) -> None:
    with pytest.raises(RuntimeError):
        on_ray.deploy(model="/nowhere/at/all")
    assert reason_of(serve.status(), NAME) == "there is no folder '/nowhere/at/all'"
    on_ray.delete()
