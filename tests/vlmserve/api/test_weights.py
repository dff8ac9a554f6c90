"""The door in front of an engine whose weights change, over a fake engine under the real control."""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from starlette.testclient import TestClient

from tests.vlmserve.api.fake_engine import BODY, CHAT, WAIT_S, Served
from tests.vlmserve.api.test_operations import assert_error
from vlmserve.ipc.control_messages import ControlRefused
from vlmserve.ipc.weight_messages import ChangeWeightsReq, CheckWeightsReq, ReleaseMemoryReq

UPDATE = "/update_weights_from_disk"
FOLDER = {"model_path": "/somewhere", "weight_version": "7"}


@pytest.fixture
def pool() -> ThreadPoolExecutor:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def running(client: TestClient, served: Served, pool: ThreadPoolExecutor) -> Future[Any]:
    """A request that the engine has, and that stays there."""
    served.scheduler.pause_after = 0
    reply = pool.submit(client.post, CHAT, json=BODY | {"rid": "mine"})
    served.scheduler.wait_until(lambda: served.scheduler.num_active)
    time.sleep(0.05)  # until it has come to its pause
    served.scheduler.pause_after = None
    return reply


def kinds(served: Served) -> list[type]:
    return [type(order) for order in served.scheduler.weights.orders]


def await_orders(served: Served, count: int) -> None:
    deadline = time.monotonic() + WAIT_S
    while len(served.scheduler.weights.orders) < count:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_an_update_waits_for_those_inside_and_others_wait_for_it(client, served, pool):
    inside = running(client, served, pool)
    update = pool.submit(client.post, UPDATE, json=FOLDER)
    await_orders(served, 1)
    outside = pool.submit(client.post, CHAT, json=BODY)
    time.sleep(0.1)
    assert kinds(served) == [CheckWeightsReq]
    assert len(served.scheduler.requests) == 1, "the second one is outside"
    assert not update.done()
    client.post("/abort_request", json={"rid": "mine"})
    assert inside.result(WAIT_S).status_code == 499
    assert update.result(WAIT_S).json()["success"]
    assert kinds(served) == [CheckWeightsReq, ChangeWeightsReq]
    assert outside.result(WAIT_S).status_code == 200
    assert client.get("/get_weight_version").json() == {"weight_version": "7"}


def test_those_inside_are_aborted_if_asked_and_those_outside_are_not(client, served, pool):
    assert client.post("/pause_generation", json={"mode": "in_place"}).status_code == 200
    outside = pool.submit(client.post, CHAT, json=BODY)
    while served.frontend.manager.num_pending < 1:
        time.sleep(0.005)
    assert client.post(UPDATE, json=FOLDER | {"abort_all_requests": True}).status_code == 200
    client.post("/continue_generation")
    assert outside.result(WAIT_S).status_code == 200
    inside = running(client, served, pool)
    assert client.post(UPDATE, json=FOLDER | {"abort_all_requests": True}).status_code == 200
    assert inside.result(WAIT_S).status_code == 499


def test_paused_those_inside_stay_and_are_counted(client, served, pool):
    inside = running(client, served, pool)
    client.post("/pause_generation", json={"mode": "retract"})
    assert served.scheduler.retracted
    assert client.post(UPDATE, json=FOLDER).json()["num_paused_requests"] == 1
    client.post("/continue_generation")
    client.post("/abort_request", json={"abort_all": True})
    assert inside.result(WAIT_S).status_code == 499


def test_what_the_check_refuses_holds_nobody_up(client, served, pool):
    inside = running(client, served, pool)
    served.scheduler.weights.refuses[CheckWeightsReq] = ControlRefused(message="norm is missing", status=400)
    refused = client.post(UPDATE, json=FOLDER)
    assert_error(refused, 400)
    assert refused.json()["error"]["message"] == "norm is missing"
    assert client.get("/get_weight_version").json() == {"weight_version": "default"}
    client.post("/abort_request", json={"abort_all": True})
    assert inside.result(WAIT_S).status_code == 499


def test_after_a_change_that_failed_half_way_nothing_is_answered_until_all_weights_have_come(client, served):
    weights = served.scheduler.weights
    weights.refuses[ChangeWeightsReq] = ControlRefused(message="the disk is gone", status=500)
    assert_error(client.post(UPDATE, json=FOLDER), 500, "server_error")
    assert "the disk is gone" in client.post(CHAT, json=BODY).json()["error"]["message"]
    served.frontend.suspend(None)  # as the watchdog does
    assert client.get("/health").status_code == 503
    del weights.refuses[ChangeWeightsReq]
    weights.missing = 3
    assert client.post(UPDATE, json=FOLDER).status_code == 200
    assert "3 tensors" in client.post(CHAT, json=BODY).json()["error"]["message"]
    assert client.post("/pause_generation").status_code == 200
    assert client.post("/continue_generation").status_code == 200
    weights.missing = 0
    assert client.post(UPDATE, json=FOLDER).status_code == 200
    assert client.post(CHAT, json=BODY).status_code == 200


def test_two_updates_come_one_after_the_other(client, served, pool):
    inside = running(client, served, pool)
    both = [pool.submit(client.post, UPDATE, json=FOLDER | {"weight_version": str(number)}) for number in range(2)]
    time.sleep(0.1)
    client.post("/abort_request", json={"rid": "mine"})
    assert [one.result(WAIT_S).status_code for one in both] == [200, 200]
    assert inside.result(WAIT_S).status_code == 499
    assert kinds(served) == [CheckWeightsReq, ChangeWeightsReq] * 2
    epochs = [order.epoch for order in served.scheduler.weights.orders if isinstance(order, ChangeWeightsReq)]
    assert len(set(epochs)) == 2


def test_released_memory_keeps_the_door_shut(client, served, pool):
    assert client.post("/release_memory_occupation", json={"tags": ["kv_cache"]}).json()["bytes"] == 8
    assert client.post("/release_memory_occupation", json={"tags": ["weights"]}).status_code == 200
    waits = pool.submit(client.post, CHAT, json=BODY | {"timeout": 20.0})
    assert_error(client.post(CHAT, json=BODY | {"timeout": 0.05}), 504, "server_error")
    client.post("/resume_memory_occupation", json={"tags": ["weights"]})
    assert not waits.done()
    client.post("/resume_memory_occupation")
    assert waits.result(WAIT_S).status_code == 200


def test_sleep_needs_its_setting(client, serve):
    assert "--enable-sleep-mode" in client.post("/sleep").json()["error"]["message"]
    served, asleep = serve(engine={"enable_sleep_mode": True})
    with asleep:
        assert_error(asleep.post("/sleep?level=3"), 400)
        assert_error(asleep.post("/wake_up?tags=sofa"), 400)
        assert asleep.post("/sleep?level=2").status_code == 200
        assert served.scheduler.weights.orders == [ReleaseMemoryReq(tags=("weights", "kv_cache"), discard=True)]
        assert asleep.get("/is_sleeping").json() == {"is_sleeping": True}
        assert asleep.post("/wake_up").status_code == 200


def test_clients_with_a_key_need_that_of_operators(serve):
    for more, status in (({}, 403), ({"admin_api_key": "root"}, 401)):
        served, client = serve(api_key="sesame", **more)
        with client:
            for path in (UPDATE, "/sleep", "/release_memory_occupation"):
                refused = client.post(path, json=FOLDER, headers={"Authorization": "Bearer sesame"})
                assert_error(refused, status, "authentication_error" if status == 401 else "invalid_request_error")
                assert "--admin-api-key" in refused.json()["error"]["message"]
        assert not served.scheduler.weights.orders


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (UPDATE, {}),
        (UPDATE, {"model_path": 7}),
        (UPDATE, FOLDER | {"is_async": True}),
        ("/update_weights_from_tensor", {"load_format": None, "serialized_named_tensors": ["AA=="]}),
        ("/update_weights_from_tensor", {"load_format": "safetensors", "serialized_named_tensors": []}),
        ("/update_weights_from_tensor", {"load_format": "safetensors", "serialized_named_tensors": ["#"]}),
        ("/update_weights_from_tensor", {"load_format": "safetensors", "serialized_named_tensors": ["AA==", "AB=="]}),
        ("/update_weights_from_tensor", {"load_format": "shared_memory"}),
        (
            "/update_weights_from_tensor",
            {"load_format": "shared_memory", "shared_memory": {"name": "../etc/passwd", "size": 1}, "tensors": []},
        ),
        ("/update_weights_from_distributed", {"names": ["a"], "dtypes": [], "shapes": [[1]]}),
        ("/init_weights_update_group", {"master_address": "a", "master_port": 0, "rank_offset": 1, "world_size": 2}),
        ("/release_memory_occupation", {"tags": ["sofa"]}),
        ("/pause_generation", {"mode": "softly"}),
    ],
)
def test_bodies_that_say_nothing_sensible(client, served, path, body):
    assert_error(client.post(path, json=body), 400)
    assert not served.scheduler.weights.orders
