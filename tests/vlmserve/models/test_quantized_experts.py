"""Experts of checkpoints of whole numbers compute what the same numbers do in transformers, dequantised."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests import hf_env  # noqa: F401
from tests.quantized_checkpoints import FORMATS, make_quantized
from tests.tiny_checkpoints import HYBRID_MOE, MOE, make_checkpoint, write_safetensors
from tests.vlmserve.models.dense_attention import assert_close, logits_of, reference_logits
from tests.vlmserve.models.edits import edit_config, edit_weights
from tests.vlmserve.models.test_expert_parts import experts_of
from tests.vlmserve.models.test_quantized import kinds
from vlmserve.memory.sizing import weight_bytes
from vlmserve.models.registry import load_model, outline_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.experts import Experts
from vlmserve_common.compute.shard import ExpertSharing, Shard
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import library

SIZES = {"moe_intermediate_size": 128, "intermediate_size": 128}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture of experts whose sizes are whole groups, also of two parts."""
    return make_checkpoint(MOE, tmp_path_factory.mktemp("sparse"), sizes=SIZES)


def kinds_of_experts(model: VisionLanguageModel) -> set[str]:
    """What the experts compute with."""

    def kind(one: Experts) -> str:
        return "ints" if one.ints is not None else "plain" if one.packed is None else one.packed[1].kind

    return {kind(one) for one in experts_of(model)}


@pytest.mark.parametrize("form", FORMATS)
def test_experts_are_those_of_transformers(sparse, tmp_path, kernels, form, caplog):
    made, same = make_quantized(sparse, tmp_path, form)
    model = load_model(made)
    expected = "plain" if kernels == "torch" else "int8" if form == "gptq-8" else "int4"
    assert kinds_of_experts(model) == {expected}
    assert ("are dequantised" in caplog.text) is (kernels == "torch")
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.slow
@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("form", FORMATS)
def test_a_gpu_keeps_them_too(sparse, tmp_path, form, caplog):
    made, same = make_quantized(sparse, tmp_path, form)
    model = load_model(made)
    assert kinds_of_experts(model) == {"ints"}
    assert "are dequantised" not in caplog.text
    assert weight_bytes(model) == weight_bytes(outline_model(made))
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize(
    ("some", "also"),
    [
        ("experts", r"mlp\.gate\.weight"),  # routers, as Qwen3-30B-A3B-GPTQ-Int4 has them
        ("experts", r"linear_attn\.(in_proj_qkv|in_proj_z|out_proj)\.weight|shared_expert\.(gate|up|down)_proj"),
        ("experts", "$^"),  # as Qwen3.5-35B-A3B-GPTQ-Int4
        ("layers.0.mlp.experts", "$^"),  # a layer
    ],
)
def test_what_is_not_quantised_stays_as_it_is(tmp_path, some, also):
    plain = make_checkpoint(HYBRID_MOE, tmp_path / "plain", sizes=SIZES)
    made, same = make_quantized(plain, tmp_path, "gptq", some=some, also=also)
    edit_config(made, {"modules_to_not_convert": ["visual"], "dynamic": {"-:.*attn.*": {}}}, "quantization_config")
    assert_close(logits_of(load_model(made)), reference_logits(same))


def test_groups_in_no_order_are_dequantised(sparse, tmp_path, kernels, caplog):
    made, same = make_quantized(sparse, tmp_path, "gptq", shuffled=True)
    model = load_model(made)
    assert kinds_of_experts(model) == kinds(model) - {"int4"} == {"plain"}
    assert "are dequantised" in caplog.text
    assert_close(logits_of(model), reference_logits(same))


@pytest.mark.parametrize("kernels", ["operators"], indirect=True)
def test_an_order_that_config_json_denies_is_refused(sparse, tmp_path, kernels):
    made, _ = make_quantized(sparse, tmp_path, "gptq", shuffled=True)
    edit_config(made, {"desc_act": False}, "quantization_config")
    with pytest.raises(CheckpointError, match=r"g_idx of \S+ puts inputs in groups out of order, which desc_act in"):
        load_model(made)


@pytest.mark.parametrize("way", ["operators", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("tp", "ep"), [(2, 1), (2, 2), (4, 2), (4, 1)])
@pytest.mark.filterwarnings("ignore:invalid value encountered")  # rows of experts elsewhere are never written
@torch.inference_mode()
def test_parts_of_experts_compute_together_what_the_whole_does(sparse, tmp_path, request, tp, ep, way):
    made, same = make_quantized(sparse, tmp_path, "awq")
    whole = experts_of(load_model(same))
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(1))
    choice = torch.randint(0, 8, (6, 3), generator=torch.Generator().manual_seed(2)), torch.rand(6, 3)
    if way == "triton":
        request.getfixturevalue("triton")
    else:
        library.activate("auto", threads=1)
    try:
        total = [torch.zeros_like(x) for _ in whole]
        for rank in range(tp):
            comm = Communicator(Shard(rank, tp, experts=ExpertSharing(ep_size=ep)))
            model = load_model(made, comm=comm, with_tower=False)
            assert kinds_of_experts(model) == {"int4" if way == "operators" else "ints"}
            for place, experts in enumerate(experts_of(model)):
                own = {expert: slot for slot, expert in enumerate(experts.part.own)}
                slots = torch.tensor([[own.get(one, -1) for one in row] for row in choice[0].tolist()])
                total[place] += experts(x, (slots, choice[1]))
    finally:
        library.activate("off", threads=1)
    for found, experts in zip(total, whole, strict=True):
        torch.testing.assert_close(found, experts(x, choice), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("way", ["operators", "triton"])
def test_rows_of_slots_are_all_that_belongs_to_experts(sparse, tmp_path, request, way):
    """So experts that change their places take everything along."""
    made, _ = make_quantized(sparse, tmp_path, "awq")
    if way == "triton":
        request.getfixturevalue("triton")
    else:
        library.activate("auto", threads=1)
    x, scores = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)), torch.ones(5, 1)
    experts = experts_of(load_model(made))[0]
    wanted = experts(x, (torch.full((5, 1), 2), scores))
    with torch.inference_mode():
        for rows in experts.rows_of_slots():
            rows[6] = rows[2]
    found = experts(x, (torch.full((5, 1), 6), scores))
    library.activate("off", threads=1)
    assert torch.equal(found, wanted)


@pytest.mark.parametrize("way", ["torch", "operators", "triton"])
def test_sizes_are_known_before_weights_are_loaded(sparse, tmp_path, request, way):
    made, _ = make_quantized(sparse, tmp_path, "awq")
    whole = sum(map(weight_bytes, experts_of(outline_model(made))))
    if way == "triton":
        request.getfixturevalue("triton")
    elif way == "operators":
        library.activate("auto", threads=1)
    outline = outline_model(made)
    library.activate("off", threads=1)
    held = sum(map(weight_bytes, experts_of(outline)))
    # of 32 bits, and with a scale and a zero of 16 bits for 32 numbers
    assert held == (whole if way == "torch" else whole * (4 + 32 / 32) / 32)


def test_what_is_missing_is_named(sparse, tmp_path):
    made, _ = make_quantized(sparse, tmp_path, "awq")
    key = "model.language_model.layers.2.mlp.experts.5.up_proj."
    tensors = load_file(made / "model.safetensors")
    edit_weights(made, lambda t: t.pop(f"{key}scales"))
    with pytest.raises(CheckpointError, match=r"experts\.5\.up_proj\.scales is missing; qweight, qzeros are there"):
        load_model(made)
    for leaf in ("qweight", "qzeros", "scales"):
        tensors.pop(key + leaf)
    write_safetensors(made, tensors | {f"{key}weight": torch.zeros(128, 64)})
    with pytest.raises(
        CheckpointError, match=r"23 of 24 weights of \S+layers\.2\.mlp\.experts are quantised; all must"
    ):
        load_model(made)
