"""What cannot be shared as the settings say is refused in one line that names the setting, before anything loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.tiny_checkpoints import HYBRID, MOE, make_checkpoint
from tests.vlmserve.parallel.sharing import SETTINGS
from tests.vlmserve.server_process import ROOT
from vlmserve import LLM
from vlmserve.config.checks import SettingsError, check_engine_args
from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import EngineError

NODES = {"nnodes": 2, "tp_size": 2}
GROUPS = {"enable_dp_attention": True, "dp_size": 2}
STORED = {"enable_hierarchical_cache": True, "hicache_storage_dir": "kv"}
HEADS = "num_attention_heads is 4, which it does not divide"
CUT = "2 ranks cut each expert, whose moe_intermediate_size is 41, which they do not divide"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tp_size": 0}, "--tp-size is 0; it must be 1 or more"),
        (STORED | {"tp_size": 2}, "--hicache-storage-dir does not go with --tp-size above 1 yet"),
        ({"nnodes": 0}, "--nnodes is 0; it must be 1 or more"),
        ({"nnodes": 2}, "--nnodes is 2; it must be a divisor of --tp-size, which is 1"),
        ({"nnodes": 2, "tp_size": 3}, "--tp-size is 3; it must be a multiple of --nnodes, which is 2"),
        (NODES | {"node_rank": 2}, "--node-rank is 2; it must be below --nnodes, which is 2"),
        (NODES, "--dist-init-addr is None; it must be HOST:PORT of machine 0"),
        (NODES | {"dist_init_addr": "here"}, "--dist-init-addr is 'here'; it must be HOST:PORT"),
        (
            {"tp_size": 2, "pp_size": 2, "nnodes": 3, "dist_init_addr": "h:1"},
            "--tp-size 2 times --pp-size 2 is 4; it must be a multiple of --nnodes",
        ),
        (STORED | {"pp_size": 2}, "--hicache-storage-dir does not go with --pp-size above 1 yet"),
        (NODES | {"dp_size": 2, "dist_init_addr": "h:1"}, "--dp-size is 2; it must be 1 where --nnodes is above 1"),
        ({"tp_size": 2, "ep_size": 3}, "--ep-size is 3; it must be a divisor of --tp-size, which is 2"),
        ({"tp_size": 2, "enable_eplb": True}, "--enable-eplb moves experts between the parties of --ep-size"),
        ({"ep_num_redundant_experts": 2}, "--ep-num-redundant-experts is 2; it must be 0 without --enable-eplb"),
        (
            {"enable_dp_attention": True, "tp_size": 2},
            "--enable-dp-attention is True; it must be left out, or --dp-size be 2 or more and divide --tp-size",
        ),
        (GROUPS | {"tp_size": 4, "dp_size": 3}, "--dp-size is 3; it must be .* divide --tp-size, which is 4"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], message: str):
    with pytest.raises(SettingsError, match=message):
        check_engine_args(EngineArgs(model="m", **settings))


@pytest.mark.parametrize(
    ("family", "sizes", "settings", "line"),
    [
        ("qwen3_vl", {}, {"tp_size": 3}, f"tp_size is 3: {HEADS}"),
        ("qwen3_vl", {}, {"pp_size": 4}, "pp_size is 4: num_hidden_layers is 3, too few for so many stages"),
        ("qwen3_vl", {}, GROUPS | {"tp_size": 6}, f"tp_size / dp_size is 3: {HEADS}"),
        ("qwen3_vl", {}, {"tp_size": 2, "ep_size": 2}, "ep_size is 2: qwen3_vl models have no experts"),
        ("qwen3_vl", {}, {"role": "encode"}, "role is 'encode': only a server has a part of the work"),
        ("qwen3_vl", {}, {"dp_size": 2}, "dp_size is 2: only a server has several replicas"),
        (
            MOE,
            {"num_experts": 7},
            {"tp_size": 2, "ep_size": 2},
            "ep_size is 2: num_experts is 7, which it does not divide",
        ),
        (MOE, {"moe_intermediate_size": 41}, {"tp_size": 2}, f"tp_size is 2: {CUT}"),
        (MOE, {"moe_intermediate_size": 41}, {"tp_size": 4, "ep_size": 2}, f"tp_size is 4 and ep_size 2: {CUT}"),
        (HYBRID, {}, {"tp_size": 4}, "tp_size is 4: linear_num_key_heads is 2, which it does not divide"),
        (
            HYBRID,
            {},
            {"pp_size": 2},
            r"pp_size is 2: layers 2 \.\. 2 are all of one kind, and each stage of a hybrid model must have both",
        ),
    ],
)
def test_models_that_do_not_fit(
    family: str, sizes: dict[str, int], settings: dict[str, Any], line: str, tmp_path: Path
):
    folder = make_checkpoint(family, tmp_path / "model")
    config = folder / "config.json"
    content = json.loads(config.read_text())
    content["text_config"].update(sizes)
    config.write_text(json.dumps(content))
    with pytest.raises(EngineError, match=line):
        LLM(str(folder), **settings, **SETTINGS)


def test_what_a_shard_has_too_few_of():
    with pytest.raises(EngineError, match="--tp-size is 5: vocab_size is 4, too few for so many"):
        Shard(0, 5).cut_vocab(4)
    with pytest.raises(EngineError, match="--tp-size is 4: num_key_value_heads is 6, which it does not divide"):
        Shard(0, 4).kv_heads(6)


HERE = "--pp-size 2 --nnodes 2 --dist-init-addr 127.0.0.1:PORT --startup-timeout-s 12 --node-rank"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--pp-size 4", "--pp-size is 4: num_hidden_layers is 3, too few for so many stages"),
        ("--dp-size 2 --tp-size 3", f"--tp-size is 3: {HEADS}"),
        (f"{HERE} 0", "rank 1 of 2 did not come within 12 s; --startup-timeout-s allows more"),
        (
            f"{HERE} 1",
            "--dist-init-addr is 127.0.0.1:PORT: rank 1 of 2 found nobody there in 12 s ([Errno 111] Connection "
            "refused); --startup-timeout-s allows more",
        ),
    ],
)
def test_the_command_ends_with_the_line(words: str, line: str, tmp_path: Path):
    folder, port = make_checkpoint("qwen3_vl", tmp_path / "model"), str(free_port())
    command = [sys.executable, "-m", "vlmserve.cli", "serve", str(folder), "--port", "0", "--num-threads", "1"]
    command += words.replace("PORT", port).split()
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")
    # it also tells of folders that killed processes of other tests left behind
    said = [one for one in ended.stderr.splitlines() if "left behind by a process that is gone" not in one]
    assert [one.removeprefix("vlmserve: error: ") for one in said] == [line.replace("PORT", port)]
