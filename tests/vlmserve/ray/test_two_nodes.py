"""Two nodes of a real cluster, on this machine: shared work, a node that is killed, and what a cluster must have."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

from tests.vlmserve.commands.caption.runs import lines
from tests.vlmserve.commands.warmup.media import png
from tests.vlmserve.server_process import ROOT

PATIENCE_S = 240.0
NODE: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 << 20}
ENGINE = {"num_threads": 1, "media_processes": 1, "max_total_tokens": 4096, "max_running_requests": 8}
FLAGS = [word for name, value in ENGINE.items() for word in (f"--{name.replace('_', '-')}", str(value))]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    made = Cluster(initialize_head=True, head_node_args=NODE)
    yield made
    made.shutdown()


def fill(folder: Path, count: int) -> Path:
    """Pictures, and two files that are none."""
    folder.mkdir()
    for number in range(count):
        (folder / f"{number:05}.png").write_bytes(png(number, 64, 64))
    (folder / "broken.png").write_bytes(png(0)[:200])
    (folder / "text.png").write_text("no picture")
    return folder


def caption(*words: object, code: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", f"{code}\nimport sys\nfrom vlmserve import cli\nsys.exit(cli.main(sys.argv[1:]))"]
    return subprocess.Popen([*command, "caption", *map(str, words), *FLAGS], cwd=ROOT, text=True, stdout=-1, stderr=-1)


def wait_for_lines(out: Path, count: int, process: subprocess.Popen[str]) -> None:
    while not out.exists() or out.read_bytes().count(b"\n") < count:
        assert process.poll() is None, process.communicate()
        threading.Event().wait(0.05)  # for another process, not synchronising with it


def run_and_kill_a_node(cluster: Cluster, folder: Path, count: int) -> dict[str, Any]:
    """Caption drawn pictures on two nodes, and kill one in the middle. Returns the summary."""
    node = cluster.add_node(**NODE)
    pictures, out, errors = fill(folder / "in", count), folder / "out.jsonl", folder / "errors.jsonl"
    words = [pictures, "--output", out, "--errors", errors, "--max-tokens", "8"]
    process = caption(*words, "--ray", cluster.address, "--ray-actors", "2", "--json")
    wait_for_lines(out, count // 3, process)
    cluster.remove_node(node, allow_graceful=False)
    told, logged = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 3, logged
    found = Counter(Path(line["id"]).name for line in lines(out))
    assert found == {f"{number:05}.png": 1 for number in range(count)}, "each once"
    failed = {Path(line["id"]).name: line["code"] for line in lines(errors)}
    assert set(failed) == {"broken.png", "text.png"}
    # nothing is left to do, and no cluster is needed to see that all is there
    again = caption(*words, "--json")
    assert again.wait(PATIENCE_S) == 3
    assert json.loads(again.communicate()[0])["skipped"] == count
    return json.loads(told)


def test_a_node_is_killed_and_each_picture_is_captioned_once(cluster, tmp_path):
    # many: two nodes caption a hundred in a second, and Ray needs about one to end a killed node's actors
    summary = run_and_kill_a_node(cluster, tmp_path, 600)
    assert (summary["done"], summary["failed"], summary["ended"]) == (600, 2, "finished")
    assert any("items under way on it were done again" in note for note in summary["notes"]), summary


def commands() -> Iterator[list[str]]:
    """The words of all processes."""
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield entry.read_text(errors="replace").split("\0")


ROWS = """
import json, sys
import ray

results, sys.stdout = sys.stdout, sys.stderr  # which takes what Ray prints
from vlmserve.ray import Captioner

folder, address, engine = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
ray.init(address, log_to_driver=False)
rows = ray.data.read_binary_files(folder, include_paths=True, override_num_blocks=24)
answered = Captioner.over(rows, actors=2, batch_size=4, options={"max_tokens": 8}, keep_media=False, **engine)
for row in answered.iter_rows():
    print(json.dumps(row), file=results, flush=True)
"""


def test_rows_of_a_dataset_are_captioned_once_though_a_node_is_killed(cluster, tmp_path):
    node = cluster.add_node(**NODE)
    folder = fill(tmp_path / "in", 60)
    words = [sys.executable, "-c", ROWS, str(folder), cluster.address, json.dumps(ENGINE)]
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(words, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=log)
        assert process.stdout is not None
        rows = []
        for line in process.stdout:
            rows.append(json.loads(line))
            if len(rows) == 20:
                cluster.remove_node(node, allow_graceful=False)
        log.seek(0)
        assert process.wait(PATIENCE_S) == 0, log.read()
    assert Counter(Path(row["path"]).name for row in rows) == {path.name: 1 for path in folder.iterdir()}
    failed = {Path(row["path"]).name for row in rows if row["error"]}
    assert failed == {"broken.png", "text.png"}
    assert all(row["caption"] for row in rows if not row["error"])
    assert all("bytes" not in row for row in rows)
    while any("MapBatches(Captioner)" in " ".join(words) for words in commands()):
        threading.Event().wait(0.05)  # for other processes, not synchronising with them


def test_what_a_cluster_must_have(cluster, tmp_path):
    folder = fill(tmp_path / "in", 1)
    words = [folder, "--output", tmp_path / "out.jsonl", "--ray", cluster.address]

    def complaint(*more: object, code: str = "") -> str:
        process = caption(*words, *more, code=code)
        _, logged = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 1, logged
        return logged.strip().splitlines()[-1]

    wanted = "--ray-actors is 3, with 2 CPUs each: the cluster has room for 1. Its nodes: "
    assert wanted in complaint("--ray-actors", 3)
    wanted = "--ray-actors is 1, with 1 CPUs, 2 GPUs each: the cluster has room for 0. Its nodes: "
    assert wanted in complaint("--device", "cuda", "--tp-size", 2)
    other = "import vlmserve_common.version\nvlmserve_common.version.__version__ = '0.0.1'"
    assert "all nodes need the same version of vlmserve: here it is 0.0.1; " in complaint(code=other)
