"""What cannot be shared as a command says ends it with one line that names the setting, before anything is loaded."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.server_process import ROOT

pytestmark = pytest.mark.slow


def refused(folder: Path, words: str) -> str:
    command = [sys.executable, "-m", "vlmserve.cli", "serve", str(folder), "--port", "0", "--num-threads", "1"]
    ended = subprocess.run([*command, *words.split()], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    return line.removeprefix("vlmserve: error: ")


@pytest.mark.parametrize(
    ("family", "sizes", "words", "line"),
    [
        ("qwen3_vl", {}, "--pp-size 4", "--pp-size is 4: num_hidden_layers is 3, too few for so many stages"),
        ("qwen3_vl", {}, "--tp-size 3", "--tp-size is 3: num_attention_heads is 4, which it does not divide"),
        (
            "qwen3_vl",
            {},
            "--dp-size 2 --tp-size 3",
            "--tp-size is 3: num_attention_heads is 4, which it does not divide",
        ),
        ("qwen3_vl", {}, "--tp-size 2 --ep-size 2", "--ep-size is 2: qwen3_vl models have no experts"),
        (
            MOE,
            {"num_experts": 7},
            "--tp-size 2 --ep-size 2",
            "--ep-size is 2: num_experts is 7, which it does not divide",
        ),
        (
            MOE,
            {"moe_intermediate_size": 41},
            "--tp-size 2",
            "--tp-size is 2: 2 ranks cut each expert, whose moe_intermediate_size is 41, which they do not divide",
        ),
        (
            MOE,
            {"moe_intermediate_size": 41},
            "--tp-size 4 --ep-size 2",
            "--tp-size is 4 and --ep-size 2: 2 ranks cut each expert, whose moe_intermediate_size is 41, which they do "
            "not divide",
        ),
        (HYBRID, {}, "--tp-size 4", "--tp-size is 4: linear_num_key_heads is 2, which it does not divide"),
        (
            HYBRID,
            {},
            "--pp-size 2",
            "--pp-size is 2: layers 2 .. 2 are all of one kind, and each stage of a hybrid model must have both",
        ),
    ],
)
def test_sizes_that_do_not_fit(family: str, sizes: dict[str, int], words: str, line: str, tmp_path: Path):
    folder = make_checkpoint(family, tmp_path / "model")
    config = folder / "config.json"
    content = json.loads(config.read_text())
    content["text_config"].update(sizes)
    config.write_text(json.dumps(content))
    assert refused(folder, words) == line


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (0, "rank 1 of 2 did not come within 12 s; --startup-timeout-s allows more"),
        (
            1,
            "--dist-init-addr is 127.0.0.1:PORT: rank 1 of 2 found nobody there in 12 s ([Errno 111] Connection "
            "refused); --startup-timeout-s allows more",
        ),
    ],
)
def test_a_stage_on_another_machine_that_never_comes(rank: int, line: str, tmp_path: Path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = f"--pp-size 2 --nnodes 2 --node-rank {rank} --dist-init-addr 127.0.0.1:{port} --startup-timeout-s 12"
    assert refused(folder, words) == line.replace("PORT", str(port))
