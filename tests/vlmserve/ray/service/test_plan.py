"""Plans of deployments: what they take, refuse and reserve."""

from __future__ import annotations

import pytest

from vlmserve.ray.service.plan import lacking, read_plan
from vlmserve_common.errors import SettingsError


def test_settings_of_both_kinds_are_taken_with_dashes_or_underscores() -> None:
    plan = read_plan({"replicas": 2, "max-replicas": 4, "tp-size": 2, "max_running_requests": 8, "dp_size": 3})
    assert (plan.deployment.replicas, plan.deployment.max_replicas) == (2, 4)
    assert plan.settings.engine.tp_size == 2
    assert plan.slots == 24
    assert plan.max_ongoing > 3 * (8 + plan.settings.engine.max_queued_requests)


@pytest.mark.parametrize(
    ("given", "complaint"),
    [
        ({"replicas": 0}, "--replicas is 0; it must be 1 or more"),
        ({"replicas": "two"}, "--replicas is 'two'; it must be a whole number"),
        ({"front": "maybe"}, "--front is 'maybe'; it must be one of auto, on, off"),
        ({"replicas": 3, "max_replicas": 2}, "--max-replicas is 2; it must be at least --replicas, which is 3"),
        ({"role": "prefill"}, "--role is set for each server by its deployment; leave it out; use --prefill-replicas"),
        ({"dist_init_addr": "a:1"}, "--dist-init-addr is set for each server"),
        ({"replicas": 2, "front": "off"}, "--front is 'off'; with several replicas it must be on"),
        ({"no_such": 1}, "--no-such: no such setting"),
        ({"target_use": 1.5}, "--target-use is 1.5; it must be above 0 and at most 1"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(given: dict[str, object], complaint: str) -> None:
    with pytest.raises(SettingsError) as raised:
        read_plan(given)
    assert str(raised.value).startswith(complaint)
    assert len(str(raised.value).splitlines()) == 1


def test_there_is_a_front_where_there_is_a_choice() -> None:
    assert not read_plan({}).has_front
    assert read_plan({"front": "on"}).has_front
    assert read_plan({"replicas": 2}).has_front
    assert read_plan({"max_replicas": 2}).has_front
    nothing_kept = {"max_files": 0, "max_batches": 0, "max_stored_responses": 0}
    assert not read_plan({"replicas": 2, "front": "off", **nothing_kept}).has_front
    shared = {"database_url": "postgresql://x/y", "file_store_url": "s3://x"}
    assert not read_plan({"replicas": 2, "front": "off", **shared}).has_front


def test_a_replica_reserves_a_gpu_for_each_rank_of_a_machine() -> None:
    def bundles(*, gpus: bool = True, **given: object) -> list[dict[str, float]]:
        return read_plan(given).bundles(cluster_has_gpus=gpus)

    assert bundles() == [{"CPU": 1.0, "GPU": 1.0}]
    assert bundles(gpus=False) == [{"CPU": 1.0}]
    assert bundles(device="cpu", cpus=4.0) == [{"CPU": 4.0}]
    assert bundles(tp_size=4, dp_size=2) == [{"CPU": 1.0, "GPU": 8.0}]
    assert bundles(tp_size=16, nnodes=2) == [{"CPU": 1.0, "GPU": 8.0}] * 2
    assert bundles(device="cuda", gpus=False) == [{"CPU": 1.0, "GPU": 1.0}]


def test_a_cluster_that_is_too_small_is_told_with_what_it_has() -> None:
    plan = read_plan({"tp_size": 4, "replicas": 2})
    bundles = plan.bundles(cluster_has_gpus=True)
    enough = {"CPU": 8.0, "GPU": 8.0}
    assert lacking([enough], plan, bundles) is None
    assert lacking([{"CPU": 8.0, "GPU": 4.0}] * 2, plan, bundles) is None
    assert lacking([{"CPU": 8.0, "GPU": 6.0}], plan, bundles) == (
        "the cluster has no room for replica 2 of 2: each needs 1 CPU and 4 GPU on a node, and its nodes have "
        "8 CPU, 6 GPU"
    )
    apart = read_plan({"tp_size": 4, "nnodes": 2})
    bundles = apart.bundles(cluster_has_gpus=True)
    assert lacking([enough, enough], apart, bundles) is None
    problem = lacking([enough], apart, bundles)
    assert problem is not None
    assert "2 GPU on each of 2 nodes (--nnodes)" in problem


def test_the_model_s_folder_is_found_from_other_folders(tmp_path, monkeypatch) -> None:
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    settings = read_plan({"model": "model"}).settings
    assert settings.engine.model == str(tmp_path / "model")
    assert settings.served_model_name == "model"
    assert read_plan({"model": "Qwen/Qwen3-VL-2B-Instruct"}).settings.engine.model == "Qwen/Qwen3-VL-2B-Instruct"


def test_workers_of_other_roles_leave_the_answers_to_the_replicas() -> None:
    plan = read_plan({"prefill_replicas": 2, "encode_replicas": 1})
    assert plan.worker_roles == {"prefill": 2, "encode": 1}
    assert plan.answering_role == "decode"
    assert plan.role_settings("encode").engine.role == "encode"
    assert read_plan({"encode_replicas": 1}).answering_role == "all"
