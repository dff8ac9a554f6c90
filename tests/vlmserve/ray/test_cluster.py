"""What a cluster must be like, and one line for what it is not."""

from __future__ import annotations

import socket
import subprocess
import sys

import pytest

from tests.test_floors import BLOCK
from vlmserve.commands.caption.command import read_command
from vlmserve.commands.caption.on_ray import bundle, threads_in
from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import EngineArgs
from vlmserve.ray.cluster import Cluster, Node
from vlmserve_common.errors import EngineError


def cluster(*resources: dict[str, float]) -> Cluster:
    """A cluster that nobody has connected to."""
    made = object.__new__(Cluster)
    made.nodes = [Node(id=str(n), address=f"10.0.0.{n}", resources=one) for n, one in enumerate(resources, 1)]
    return made


def test_an_actor_is_on_one_node():
    two = cluster({"CPU": 8, "GPU": 3}, {"CPU": 8, "GPU": 1}, {"CPU": 2})
    assert two.room({"CPU": 1, "GPU": 2}) == 1
    assert two.room({"CPU": 0.5, "GPU": 0}) == 36
    two.check_room({"CPU": 1, "GPU": 1}, 4, what="--ray-actors")
    told = r"^--ray-actors is 2, with 1 CPUs, 2 GPUs each: the cluster has room for 1. Its nodes: 10.0.0.1 has 8 CPUs, "
    with pytest.raises(EngineError, match=told + "3 GPUs; 10.0.0.2 has 8 CPUs, 1 GPUs; 10.0.0.3 has 2 CPUs$"):
        two.check_room({"CPU": 1, "GPU": 2}, 2, what="--ray-actors")


@pytest.mark.parametrize(
    ("device", "nodes", "cpus", "expected"),
    [
        ("auto", [{"CPU": 8}, {"CPU": 4}, {"CPU": 0}], None, {"CPU": 4, "GPU": 0}),
        ("auto", [{"CPU": 8}], 0.5, {"CPU": 0.5, "GPU": 0}),
        ("auto", [{"CPU": 8, "GPU": 2}], None, {"CPU": 1, "GPU": 2}),
        ("cuda", [{"CPU": 8}], None, {"CPU": 1, "GPU": 2}),  # too few, which `check_room` tells
        ("cpu", [{"CPU": 8, "GPU": 2}], None, {"CPU": 8, "GPU": 0}),
    ],
)
def test_each_rank_has_a_gpu_where_there_are_any(device, nodes, cpus, expected):
    assert bundle(cluster(*nodes), EngineArgs(model="", device=device, tp_size=2), cpus) == expected


def test_a_cpu_is_left_for_reading_where_a_dataset_is_read():
    for cpus, expected in ((8, 7), (2, 1), (1, 0.5)):
        assert bundle(cluster({"CPU": cpus}), EngineArgs(model=""), None, spare=1.0) == {"CPU": expected, "GPU": 0}


def test_threads_are_those_that_were_reserved():
    assert [threads_in({"CPU": cpus, "GPU": 0}) for cpus in (0.5, 1, 3.5, 8)] == [1, 1, 3, 8]
    assert threads_in({"CPU": 8, "GPU": 1}) is None


def test_no_cluster_at_the_address():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))  # and nobody listens
        port = free.getsockname()[1]
        with pytest.raises(EngineError, match=f"^--ray 127.0.0.1:{port}: no Ray cluster answers there: .*refused"):
            Cluster(f"127.0.0.1:{port}")


def test_an_input_is_no_address():
    assert (read_command(["a", "--ray"]).ray, read_command(["a", "--ray", "h:6379"]).ray) == ("auto", "h:6379")
    assert read_command(["a"]).ray is None
    for word in ("pictures/", "http://a:8000/v1", "a.jsonl", "h:", ":6379", ""):
        with pytest.raises(SettingsError, match=r"--ray is .*; it must be host:port of the cluster's head"):
            read_command(["a", "--ray", word])


def test_flags_that_need_each_other():
    for words, told in (
        (["--ray-actors", "2"], "--ray-actors and --ray-cpus go with --ray"),
        (["--ray", "--ray-actors", "0"], "--ray-actors is 0; it must be 1 or more"),
        (["--ray", "--ray-cpus", "0"], "--ray-cpus is 0.0; it must be above 0"),
        (["--ray", "--base-url", "http://a"], "--ray and --base-url: give one"),
    ):
        with pytest.raises(SettingsError, match=told):
            read_command(["a", *words])
    command = read_command(["a", "--ray", "--ray-actors", "3", "--ray-cpus", "0.5", "--tp-size", "2"])
    assert (command.ray_actors, command.ray_cpus, command.settings.engine.tp_size) == (3, 0.5, 2)


def test_ray_is_needed_on_a_cluster_only():
    code = BLOCK.format(blocked={"ray"}) + (
        "import vlmserve.ray, vlmserve.commands.caption.on_ray\n"
        "from vlmserve.ray import Captioner, VLMProcessor\n"
        "from vlmserve.ray.cluster import Cluster\n"
        "import importlib.util\n"
        "importlib.util.find_spec = lambda name: None\n"
        "try: Cluster('auto')\n"
        "except Exception as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("--ray needs ray: ")
    assert "[cluster]" in done.stdout
