"""What a model takes on GPUs, and the least that its steps take there, beside sums by hand and the engine's own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import HYBRID, MOE, STREAMED, make_checkpoint
from tests.vlmserve.models.edits import edit_config
from tests.vlmserve.test_eagle import LAYOUTS, make_head
from vlmserve import cli
from vlmserve.commands.bench.checkpoints import write_folder
from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.plan import lay_out, make_plan
from vlmserve.commands.plan.published import PUBLISHED, SHAPES, write_config
from vlmserve.commands.plan.table import overview
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.engine.model_loading import attach_guessing, bytes_per_token, for_heads
from vlmserve.engine.rank_processes import rank_shard
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.floors import expert_bytes
from vlmserve.models.random_weights import random_model
from vlmserve.models.registry import outline_model
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import EngineError
from vlmserve_common.installing import hf
from vlmserve_common.kernels import fused

_235B = SHAPES["235b-a22b"]
_GIB = 2**30
# Of the 235B, by hand: numbers of all layers but for experts, of all experts, and of the embedding, which the head has,
# too. Norms and the router are whole on each rank.
_WIDTH, _EXPERT, _VOCAB = 4096, 3 * 4096 * 1536, 151936 * 4096
_NORMS = 94 * (2 * _WIDTH + 2 * 128 + 128 * _WIDTH)
_TOWER = 0.576e9


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("configs")
    shapes = {"235b": _235B, "30b": SHAPES["30b-a3b"], "2b": SHAPES["2b"], "8b": SHAPES["8b"]}
    return {name: write_folder(made / name, shape) for name, shape in shapes.items()}


@pytest.fixture
def plan(folders: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """The command's JSON."""

    def run(model: str, words: str) -> dict[str, Any]:
        assert cli.main(["plan", str(folders[model]), "--json", *words.split()]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_the_235b_on_eight_gpus(plan):
    found = plan("235b", "--tp 8 --ep 8 --gpu h200")
    [stage] = found["stages"]
    # eight query heads and one key and value head on each GPU
    attention = 94 * _WIDTH * 128 * (8 + 2 + 8)
    assert stage["layers_without_experts"] == pytest.approx(2 * (attention + _NORMS), rel=0.01)
    assert stage["experts"] == 2 * 94 * 16 * _EXPERT
    assert stage["embedding"] == stage["head"] == 2 * _VOCAB // 8
    assert stage["tower"] == pytest.approx(2 * _TOWER, rel=0.01)
    weights = 2 * (attention + _NORMS + 94 * 16 * _EXPERT + 2 * _VOCAB / 8 + _TOWER)
    assert stage["weights"] == pytest.approx(weights, rel=0.01)
    assert stage["kv_bytes_per_token"] == 94 * 2 * 128 * 2
    left = 140.4 * _GIB * 0.8 - _GIB - stage["weights"]
    assert stage["kv_cache"] == pytest.approx(left, rel=1e-3)


def test_the_cache_of_embeddings_has_a_part_of_what_weights_leave(plan):
    found = plan("235b", "--tp 8 --ep 8 --gpu h200")
    [stage] = found["stages"]
    assert stage["embeddings"] == int((140.4 * _GIB - _GIB - stage["weights"]) / 32)
    assert found["pictures_cached"] == stage["embeddings"] // (4 * 4096 * 2 * 1024) == 83
    more = plan("235b", "--tp 8 --ep 8 --gpu h200 --encoder-cache-mib 40960 --disable-cuda-graph")
    assert more["pictures_cached"] == 1280
    assert more["stages"][0]["kv_cache"] < stage["kv_cache"], "beyond what --mem-fraction-static leaves"


def test_what_servers_of_different_roles_send_each_other(plan, folders, capsys):
    """The 235B on eight GPUs for prompts and eight for answers, encoders beside."""
    words = "--tp 8 --ep 8 --gpu h200 --context 4096 --server-link-gbit-s 400"
    found = plan("235b", words)
    sent, [stage] = found["hand_over"], found["stages"]
    a_token = 8 * 94 * 2 * 128 * 2  # a head at each of eight GPUs, of four heads
    assert (sent["kv"], sent["kv_seconds"]) == (4096 * a_token, 4096 * a_token / 50e9)
    assert (sent["picture"], sent["picture_seconds"]) == (2**25, 2**25 / 50e9)
    assert sent["most"] == pytest.approx(a_token * found["prefill"]["tokens_per_second"])
    assert stage["tower"] < sent["tower"] < stage["tower"] + stage["computing"]
    groups = plan("235b", f"{words} --dp 8 --enable-dp-attention")["hand_over"]
    assert groups["kv"] == 4096 * 94 * 2 * 4 * 128 * 2, "no head twice"
    assert plan("235b", f"{words} --tp 4 --ep 4 --pp 2")["hand_over"]["kv"] == groups["kv"]
    assert plan("235b", "--tp 8")["hand_over"] is None
    assert cli.main(["plan", str(folders["235b"]), *words.split()]) == 0
    page = (Path(__file__).parents[4] / "docs" / "parallel.md").read_text()
    shown = capsys.readouterr().out
    lines = shown[shown.index("A prefill") :].splitlines()[:3]
    assert lines[2].startswith("An encode server")
    assert "\n".join(lines) in page


def test_exchanges_are_those_of_the_textbook(plan):
    """Two sums a layer and one of embeddings, of which a ring moves 7/8 twice; and seven eighths of the logits."""
    alone = plan("235b", "--tp 8 --batch 64 --link-gbs 0")["decode"]["64"]
    beside = plan("235b", "--tp 8 --batch 64 --link-gbs 100")["decode"]["64"]
    moved = 189 * 2 * 7 / 8 * 64 * 4096 * 2 + 7 / 8 * 64 * 151936 * 4
    assert alone["exchange_seconds"] == 0
    assert beside["exchange_seconds"] == pytest.approx(moved / 100e9)
    assert beside["seconds"] == pytest.approx(alone["seconds"] + moved / 100e9)


def test_a_prompt_is_bound_by_operations(plan):
    found = plan("8b", "--prompt 8192 --gpu h100")["prefill"]
    weights = 36 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 12288)
    flops = 2 * 8192 * weights + 4 * 36 * 4096 * 8192 * 8193 / 2 + 2 * 151936 * 4096
    assert found["seconds"] == pytest.approx(flops / 989e12, rel=1e-6)


def test_stages_have_all_layers_between_them(plan):
    one, two = plan("235b", "--tp 8"), plan("235b", "--tp 4 --pp 2")
    first, second = two["stages"]
    assert (first["layers"], second["layers"]) == ([0, 47], [48, 93])  # and the head
    assert first["experts"] + second["experts"] == 2 * one["stages"][0]["experts"]
    assert (first["head"], second["embedding"], second["tower"]) == (0, 0, 0)
    assert first["embedding"] == second["head"] == 2 * _VOCAB // 4
    rooms = [stage["kv_cache"] // stage["kv_bytes_per_token"] // 16 * 16 for stage in (first, second)]
    assert rooms[0] != rooms[1]
    assert two["kv_tokens"] == min(rooms), "the stage with the least room"


def test_groups_with_attention_of_their_own_share_experts(plan):
    found = plan("235b", "--tp 8 --ep 8 --dp 8 --enable-dp-attention --context 1024 --batch 64 --link-gbs 0")
    [stage] = found["stages"]
    assert found["layout"]["gpus"] == 8
    assert stage["experts"] == 2 * 94 * 16 * _EXPERT
    assert stage["embedding"] == 2 * _VOCAB // 8, "all ranks have a part of it"
    assert stage["kv_bytes_per_token"] == 94 * 2 * 4 * 128 * 2
    # each reads the contexts of its eight requests, and the experts that all 64 hit
    read = stage["layers_without_experts"] + stage["experts"] * 125.94 / 128 + stage["embedding"]
    read += 8 * 1024 * stage["kv_bytes_per_token"]
    assert found["decode"]["64"]["bytes_read"] == pytest.approx(read, rel=1e-3)


def test_replicas_are_counted(plan):
    one, four = plan("8b", "--batch 8"), plan("8b", "--batch 8 --dp 4")
    assert four["layout"]["gpus"] == 4
    assert four["kv_tokens"] == one["kv_tokens"]
    assert four["decode"]["8"]["tokens_per_second"] == pytest.approx(4 * one["decode"]["8"]["tokens_per_second"])


def test_8_bit_checkpoints_take_half(tmp_path, folders, capsys):
    config = json.loads((folders["235b"] / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    file = tmp_path / "of-the-hub.json"
    file.write_text(json.dumps(config))
    assert cli.main(["plan", str(file), "--tp", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    [stage] = found["stages"]
    scales = 1 + 4 / 128**2
    assert stage["experts"] == pytest.approx(94 * 16 * _EXPERT * scales, rel=1e-6)
    assert stage["head"] == 2 * _VOCAB // 8, "as it was"
    [note] = [note for note in found["notes"] if "share a scale" in note]
    assert note.startswith("192 of an expert's 1536 inner elements")
    assert cli.main(["plan", str(file), "--tp", "8", "--ep", "8"]) == 0
    printed = capsys.readouterr().out
    assert "share a scale" not in printed
    assert "| decode step of 8 " in printed


def test_a_tied_head_is_held_once_and_read(plan):
    [stage] = plan("2b", "")["stages"]
    assert stage["head"] == 0
    found = plan("2b", "--batch 1 --context 1")["decode"]["1"]["bytes_read"]
    kv = stage["kv_bytes_per_token"]
    assert found == stage["layers_without_experts"] + stage["embedding"] + kv


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("tp", [1, 2])
def test_weights_are_those_that_the_engine_loads(tmp_path, family, tp):
    folder = make_checkpoint(family, tmp_path)
    [stage] = lay_out(folder, EngineArgs(model=str(folder), tp_size=tp)).stages
    model = outline_model(folder, shard=Shard(0, tp))
    head = 0 if model.lm_head is None else weight_bytes(model.lm_head)
    assert stage.weights == weight_bytes(model)
    assert stage.head == head


@pytest.mark.parametrize(
    ("form", "some", "said"),
    [
        ("awq", "", {}),
        ("awq", "mlp", {"modules_to_not_convert": ["visual", "self_attn"]}),
        ("gptq", "experts", {"dynamic": {"-:.*attn.*": {}, r"-:.*layers\.1\.mlp.*": {}, "+:.*": {"bits": 4}}}),
        ("compressed-tensors", "layers.2.", {"ignore": ["lm_head", r"re:.*layers\.[01]\..*"]}),
        ("compressed-tensors", "", {"ignore": ["model.language_model.layers.0.mlp.gate"]}),
    ],
)
def test_weights_of_few_bits_are_those_that_a_gpu_keeps(tmp_path: Path, form: str, some: str, said: dict) -> None:
    plain = make_checkpoint(MOE, tmp_path / "plain", sizes={"moe_intermediate_size": 128})
    made, _ = make_quantized(plain, tmp_path, form, some=some)
    edit_config(made, said, "quantization_config")
    [stage] = lay_out(made, EngineArgs(model=str(made))).stages
    fused.activate("triton", torch.device("cpu"))
    try:
        outline = outline_model(made)
    finally:
        fused.activate("torch", torch.device("cpu"))
    assert any(parameter.dtype == torch.uint8 for parameter in outline.parameters())
    assert stage.weights == weight_bytes(outline)
    assert stage.experts == expert_bytes(outline)


def test_a_smaller_model_that_guesses_is_held_too(tmp_path: Path) -> None:
    folder, draft = (make_checkpoint("qwen3_vl", tmp_path / name) for name in ("model", "draft"))
    alone, guessing = EngineArgs(model=str(folder)), {"speculative_draft_model_path": str(draft)}
    [plain] = lay_out(folder, alone).stages
    [more] = lay_out(folder, EngineArgs(model=str(folder), speculative_algorithm="draft_model", **guessing)).stages
    assert more.weights == plain.weights + weight_bytes(outline_model(draft))
    assert (more.tower, more.kv) == (2 * plain.tower, 2 * plain.kv)


@pytest.mark.parametrize(
    ("algorithm", "family"),
    [("draft_model", "qwen3_vl"), ("eagle3", "qwen3_vl"), ("mtp", HYBRID), ("mtp", STREAMED), ("ngram", STREAMED)],
)
def test_each_stage_holds_what_the_engine_loads_there(tmp_path: Path, algorithm: str, family: str) -> None:
    mixers = ("linear_attention", "full_attention") * 2
    folder = make_checkpoint(family, tmp_path / "model", tied=False, mtp=algorithm == "mtp", mixers=mixers)
    path = None
    if algorithm == "draft_model":
        path = make_checkpoint("qwen3_vl", tmp_path / "draft")
    elif algorithm == "eagle3":
        path = make_head(tmp_path / "head", LAYOUTS["own"][0], embedding=False)
    guessing = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path and str(path)}
    args = EngineArgs(model=str(folder), pp_size=2, **guessing)
    for stage, share in enumerate(lay_out(folder, args).stages):
        outline = outline_model(folder, shard=rank_shard(args, stage), **for_heads(args))
        attach_guessing(args, outline, "meta")
        elsewhere = 0 if stage == 0 else sum(weight_bytes(tower) for tower in outline.towers)
        assert share.weights == weight_bytes(outline) - elsewhere
        assert share.kv == bytes_per_token(outline, outline.dtype)
        assert share.state == state_shape(outline.config, outline.dtype)


@pytest.mark.parametrize(
    ("model", "words", "complaint"),
    [
        ("235b", "--tp 2", "All weights take about 440.1 GiB: 4 such GPUs at the least"),
        ("235b", "--tp 4 --context 262144", "no request of 262144 tokens (--context) fits"),
        ("8b", "--context 300000", "--context is 300000, and requests have 262144 tokens at the most"),
        ("8b", "--context 5000 --max-model-len 4096", "requests have 4096 tokens at the most"),
        ("8b", "--tp 3", "--tp-size is 3: num_attention_heads is 32, which it does not divide"),
        ("235b", "--tp 4 --pp 2 --dp 2 --enable-dp-attention", "--pp-size is 2; it must be 1 with"),
        ("8b", "--tp 0", "--tp-size is 0"),
        ("8b", "--quantization int4", "--quantization int4 is for CPUs: --gpu cpu plans for this machine's"),
        ("8b", "--gpu cpu --gpu-memory-gib 16 --bandwidth-gbs 1 --tflops 1", "does not fit: a CPU has 16 GiB: weights"),
        ("8b", "--gpu-memory-gib 16", "the model does not fit: a GPU has 16 GiB: weights take 16.33 GiB"),
    ],
)
def test_what_cannot_be_is_refused_with_numbers(folders, capsys, model, words, complaint):
    wrong_settings = complaint.startswith(("--pp-size is", "--tp-size is 0"))
    assert cli.main(["plan", str(folders[model]), *words.split()]) == (2 if wrong_settings else 1)
    error = capsys.readouterr().err
    assert complaint in error
    assert len(error.splitlines()) == 1


def test_layers_with_windows_have_slots_of_their_own(tmp_path, capsys):
    """Of 28 layers, 8 keep 8 windows of 1024 tokens, and what is in flight."""
    write_config(SHAPES["qwen2.5-7b"], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    found = {}
    for name, more in {"full": {}, "windows": {"use_sliding_window": True, "sliding_window": 1024}}.items():
        config["text_config"] = config["text_config"] | more | {"max_window_layers": 20}
        (tmp_path / "config.json").write_text(json.dumps(config))
        words = f"plan {tmp_path} --gpu h200 --max-running-requests 8 --context 100000".split()
        assert cli.main([*words, "--json"]) == 0
        found[name] = json.loads(capsys.readouterr().out)
    full, windows = found["full"], found["windows"]
    assert windows["window_tokens"] == 8 * (1024 + 2 + 8 + 32) + 2 * 2048
    [stage] = windows["stages"]
    layer = stage["kv_bytes_per_token"] // 28
    spared = (windows["kv_tokens"] - windows["window_tokens"]) * 8 * layer
    taken = windows["kv_tokens"] * stage["kv_bytes_per_token"] - spared
    assert stage["kv_cache"] - 16 * stage["kv_bytes_per_token"] < taken <= stage["kv_cache"]
    assert full["window_tokens"] == full["kv_tokens"] < windows["kv_tokens"]
    read = {name: one["decode"]["8"]["bytes_read"] for name, one in found.items()}
    assert read["full"] - read["windows"] == 8 * (100000 - 1024) * 8 * layer
    assert cli.main(words) == 0
    assert f"Layers with windows, {8 * layer / 1024:g} KiB of it, keep 12624 tokens" in capsys.readouterr().out


def test_settings_are_the_engine_s(plan, folders, capsys):
    full, small = plan("30b", "--gpu h200"), plan("30b", "--kv-cache-dtype fp8_e4m3 --mem-fraction-static 0.9")
    assert small["stages"][0]["kv_bytes_per_token"] * 2 == full["stages"][0]["kv_bytes_per_token"]
    assert small["kv_tokens"] > 2 * full["kv_tokens"]
    for flag in ("--gpu-memory-gib", "--bandwidth-gbs", "--tflops"):
        with pytest.raises(SystemExit):
            cli.main(["plan", str(folders["8b"]), flag, "0"])
        assert "'0' must be a number above 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "captured"),
    [
        ("--tp 2", True),
        ("--tp 2 --ep 2", True),
        ("--pp 2", False),
        ("--tp 16 --ep 16", False),
        ("--tp 2 --dp 2 --enable-dp-attention", True),
        ("--tp 2 --dp 2 --ep 2 --enable-dp-attention", False),
        ("--tp 2 --disable-cuda-graph", False),
    ],
)
def test_memory_for_captured_steps(plan, words: str, captured: bool):
    """Of what weights and computing leave a tenth, at the most, where the engine captures them."""
    stage = plan("30b", f"{words} --gpu h100")["stages"][0]
    assert (stage["graphs"] > 0) == captured


def test_the_documented_table_is_what_the_command_prints(folders, capsys):
    words = "--tp 8 --ep 8 --gpu h200 --context 4096"
    page = (Path(__file__).parents[4] / "docs" / "parallel.md").read_text()
    assert f"config.json {words}\n" in page
    assert cli.main(["plan", str(folders["235b"] / "config.json"), *words.split()]) == 0
    assert f"```text\n{capsys.readouterr().out}```" in page


_CPU = "--gpu cpu --gpu-memory-gib 20 --bandwidth-gbs 20 --tflops 0.4"


def test_published_models_on_a_cpu(capsys: pytest.CaptureFixture[str]) -> None:
    """Without a model."""
    assert cli.main(["plan", "--json", *_CPU.split()]) == 0
    found = json.loads(capsys.readouterr().out)
    names = [shape.hub_id for shape in PUBLISHED]
    assert list(found) == names
    large = {name for name in names if re.search(r"-\d{2,3}B", name)}
    assert {name for name in names if "error" in found[name]} == large | {
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.8-Flash-Next",
    }, "states take 3 GiB"


def test_published_models_have_the_published_sizes(tmp_path: Path) -> None:
    """The figures of docs/memory.md, and of the checkpoints' own files; there are no larger ones after smaller ones."""
    sizes = {}
    for shape in PUBLISHED:
        folder = tmp_path / shape.what
        folder.mkdir()
        model = random_model(write_config(shape, folder), "meta")
        sizes[shape.what] = sum(one.numel() for one in model.parameters())
    assert sizes["Qwen2-VL-2B"] == 2208985600
    assert sizes["Qwen2.5-VL-7B"] == 8292166656
    assert sizes["Qwen3-VL-8B"] == 8767123696
    assert sizes["Qwen3.5-9B"] == 9409813744
    billions = {"Qwen2-VL-7B": 8.29, "Qwen2.5-VL-32B": 33.45, "Qwen2-VL-72B": 73.41, "Qwen2.5-VL-72B": 73.41}
    assert {name: sizes[name] / 1e9 for name in billions} == pytest.approx(billions, abs=0.005)
    assert sizes["Qwen3.5-35B-A3B"] / 1e9 == pytest.approx(34.66 + 0.45, abs=0.01)
    assert [round(size / 1e9) for size in sizes.values()] == sorted(round(size / 1e9) for size in sizes.values())


def test_the_table_of_several_models(folders: dict[str, Path]) -> None:
    cpu = Gpu(name="CPU", memory=20 * _GIB, bandwidth=20e9, flops=0.4e12, is_cpu=True)
    args = EngineArgs(model=str(folders["2b"]))
    plan = make_plan(args, cpu, context=1, batches=[1], prompt=1, reserved=0)
    table = overview(cpu, {"small": plan, "large": EngineError("the model does not fit: for reasons")})
    rows = [line.split("|")[1:-1] for line in table.splitlines() if line.startswith("|")]
    shown = {name.strip(): [cell.strip() for cell in cells] for name, *cells in rows}
    assert shown["large"] == ["the model does not fit", "", "", ""]
    assert shown["small"][:2] == [f"{plan.stages[0].stage.weights / _GIB:.3g}", f"{1 / plan.decode[1].seconds:.3g}"]


def test_a_cpu_holds_and_reads_what_the_engine_does(plan) -> None:
    found = plan("2b", f"{_CPU} --context 1")
    [stage] = found["stages"]
    assert stage["head"] == stage["embedding"], "its operators keep a copy"
    assert (stage["graphs"], stage["reserved"]) == (0, 0)
    assert stage["kv_cache"] == 2 * _GIB, "--cpu-kv-cache-gib"
    weights, kv = stage["layers_without_experts"] + stage["head"], stage["kv_bytes_per_token"]
    assert found["decode"]["1"]["seconds"] == pytest.approx((weights + kv) / 20e9)
    in_8_bits = plan("2b", f"{_CPU} --context 1 --quantization int8")
    assert in_8_bits["stages"] == found["stages"], "they are loaded before they are rounded"
    assert in_8_bits["decode"]["1"]["seconds"] == pytest.approx((weights * 8.5 / 16 + kv) / 20e9)


def test_this_cpu_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DEFAULT_MODEL), "--gpu", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "TFLOP/s, measured here." in printed
    assert f"| {DEFAULT_MODEL} | " in printed


def test_the_built_in_model_takes_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", str(DEFAULT_MODEL)]) == 0
    printed = capsys.readouterr().out
    assert "with 4096 tokens of context" in printed
    assert "| prompt of 4096 " in printed
    assert " 0.0083e9 parameters, of which a token goes through 0.0034e9;" in printed, "no figure is rounded to nothing"
    assert " 0.00 " not in printed


def test_how_to_get_the_config_of_a_model_of_the_hub_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "someone/Some-VL"]) == 2
    assert f"its config.json is enough: {hf()} download someone/Some-VL config.json\n" in capsys.readouterr().err
    assert cli.main(["plan", "Qwen/Qwen3-VL-2B-Instruct", "--revision", "v9"]) == 2, "another one may differ"
    assert "download Qwen/Qwen3-VL-2B-Instruct config.json --revision v9\n" in capsys.readouterr().err
    for name in ("Qwen/Qwen3-VL-2B-Instruct", "Qwen/Qwen3.5-9B"):
        assert cli.main(["plan", name, "--json"]) == 0, "the config of a published one is known"
