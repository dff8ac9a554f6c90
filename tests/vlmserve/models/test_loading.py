"""Checkpoints in all their published forms load, and broken ones are refused with the reason."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from tests.tiny_checkpoints import FAMILIES, MOE, make_checkpoint
from tests.vlmserve.models.edits import edit_config, edit_weights
from vlmserve.models.config import ModelDefaults, read_model_config
from vlmserve.models.registry import load_config, load_model
from vlmserve_common.errors import CheckpointError

LAYER = {"qwen2_vl": "model.layers.1.", "qwen2_5_vl": "model.layers.1.", "qwen3_vl": "model.language_model.layers.1."}


def weights_of(folder, **options) -> dict[str, torch.Tensor]:
    """All parameters of the loaded model."""
    return load_model(folder, **options).state_dict()


def assert_same(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("family", FAMILIES)
def test_all_layouts_give_the_same_weights(tmp_path, family):
    base = weights_of(make_checkpoint(family, tmp_path / "a"))
    for number, options in enumerate(({"shards": 3}, {"nested_names": True}, {"nested_names": False})):
        assert_same(weights_of(make_checkpoint(family, tmp_path / str(number), **options)), base)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_checkpoints_of_any_dtype_load_into_any(tmp_path, dtype):
    folder = make_checkpoint("qwen3_vl", tmp_path, dtype=dtype)
    own = load_model(folder)
    assert own.dtype == own.config.dtype == getattr(torch, dtype)
    for target in (torch.float32, torch.bfloat16, torch.float16):
        model = load_model(folder, dtype=target)
        assert model.dtype == target
        assert {parameter.dtype for parameter in model.parameters()} == {target}
        for name, value in own.state_dict().items():
            assert torch.equal(model.state_dict()[name], value.to(target)), name


def test_a_tied_checkpoint_may_carry_its_head_and_old_constants(tmp_path):
    folder = make_checkpoint("qwen2_vl", tmp_path)
    base = weights_of(folder)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    edit_weights(folder, add)
    assert_same(weights_of(folder), base)


def test_no_weight_requires_a_gradient_or_is_left_on_meta(tmp_path):
    model = load_model(make_checkpoint("qwen2_5_vl", tmp_path))
    assert not any(parameter.requires_grad or parameter.is_meta for parameter in model.parameters())
    assert not model.training


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t, layer: t.pop(f"{layer}self_attn.k_proj.weight"),
            r"1 missing: language_model\.layers\.1\.self_attn\.k_proj\.weight \(though q_proj, v_proj is there\)",
        ),
        (
            lambda t, layer: t.update({f"{layer}mlp.gate_proj.weight": torch.zeros(96, 65)}),
            r"1 of the wrong shape: \S+gate_proj\.weight is \[96, 65\], not \[96, 64\]",
        ),
        (lambda t, layer: t.update({"model.surprise": torch.zeros(1)}), r"1 unexpected: model\.surprise"),
        (
            lambda t, layer: t.update({f"{layer.replace('1', '3')}mlp.down_proj.weight": torch.zeros(64, 96)}),
            r"1 unexpected: \S+layers\.3\.mlp",
        ),
        (
            lambda t, layer: t.update(
                {f"model.language_model.{n}norm.weight": torch.zeros(64) for n in ("", "x")}
                | {"model.norm.weight": torch.zeros(64)}
            ),
            r"1 unexpected: model\.language_model\.xnorm\.weight\. 1 given twice: .*norm\.weight = ",
        ),
    ],
    ids=["missing", "shape", "unexpected", "layer-too-many", "twice"],
)
def test_every_tensor_is_accounted_for(tmp_path, family, change, message):
    folder = make_checkpoint(family, tmp_path)
    edit_weights(folder, lambda tensors: change(tensors, LAYER[family]))
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_without_the_tower_all_else_is_loaded_and_the_towers_tensors_are_passed_over(tmp_path, family):
    folder = make_checkpoint(family, tmp_path, tied=False)
    whole = load_model(folder).state_dict()
    edit_weights(
        folder,
        lambda tensors: [tensors.pop(name) for name in list(tensors) if name.endswith("visual.merger.mlp.0.bias")],
    )
    rest = load_model(folder, dtype=torch.float32, with_tower=False)
    assert all(parameter.is_meta for parameter in rest.visual.parameters())
    for name, value in rest.state_dict().items():
        assert value.is_meta == name.startswith("visual.")
        assert value.is_meta or torch.equal(value, whole[name])
    edit_weights(folder, lambda tensors: tensors.update({"model.surprise": torch.zeros(1)}))
    with pytest.raises(CheckpointError, match=r"1 unexpected: model\.surprise\.?$"):
        load_model(folder, with_tower=False)


def test_unknown_families_are_refused(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    edit_config(folder, {"model_type": "llava", "architectures": ["Llava"]})
    with pytest.raises(
        CheckpointError,
        match=r"'llava' \(architectures .*supported are qwen2_vl, qwen2_5_vl, qwen3_vl, qwen3_vl_moe, qwen3_5, qwen3_",
    ):
        load_model(folder)


def test_the_architecture_is_enough_to_know_a_family(tmp_path):
    folder = make_checkpoint("qwen2_vl", tmp_path)
    edit_config(folder, {"model_type": None})
    assert load_config(folder).family == "qwen2_vl"
    load_model(folder)


def test_a_folder_that_is_no_checkpoint_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=r"has no config\.json"):
        load_model(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        load_model(tmp_path / "absent")


def test_both_forms_of_rotary_parameters_are_read(tmp_path):
    folder = make_checkpoint("qwen3_vl", tmp_path)
    hf_config = json.loads((folder / "config.json").read_text())
    text = hf_config["text_config"]
    old = load_config(folder)
    rope = text.pop("rope_scaling") | {"rope_theta": text.pop("rope_theta")}
    edit_config(folder, {"text_config": text | {"rope_parameters": rope}})
    assert load_config(folder) == old


DEFAULTS = ModelDefaults(rope_theta=1e6, mrope_section=(2, 3, 3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_sliding_window": True}, "use_sliding_window is true, which this family does not have"),
        (
            {"rope_scaling": {"type": "longrope", "factor": 4.0}},
            "type 'longrope' is not supported; supported: default, ",
        ),
        ({"rope_scaling": {"type": "yarn", "factor": 0.5}}, "factor is 0.5, and must be from 1 to 2097151"),
        ({"rope_scaling": {"type": "linear", "factor": 1e300}}, "must be from 1 to 2097151"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "factor is nan"),
        ({"rope_scaling": {"type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "beta_fast": -1}}, "beta_fast is -1.0, and must be above 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "attention_factor": 0}}, "attention_factor is 0"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1, "mscale_all_dim": -9}}, "mscale_all_dim is -9"),
        (
            {"rope_scaling": {"type": "llama3", "factor": 2, "low_freq_factor": 4, "high_freq_factor": 1}},
            "high_freq_factor is 1.0, and must be above low_freq_factor, 4.0",
        ),
        ({"rope_scaling": {"full_attention": {"type": "yarn"}}}, r"kinds of layers \(full_attention\)"),
        ({"rope_theta": 1}, "rope_theta is 1.0, and must be above 1"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 4]}}, "sum of half a head"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": -5}, "vocab_size is -5"),
        ({"torch_dtype": "int8"}, "'int8'"),
        ({"eos_token_id": "end"}, "eos_token_id is 'end'"),
    ],
)
def test_impossible_and_unsupported_configurations_are_refused(tmp_path, change, message):
    folder = make_checkpoint("qwen2_vl", tmp_path)
    hf_config = json.loads((folder / "config.json").read_text()) | change
    with pytest.raises(CheckpointError, match=message):
        read_model_config(hf_config, {}, DEFAULTS)


@pytest.mark.parametrize(
    ("family", "section", "change", "message"),
    [
        ("qwen2_vl", "", {"vision_config": None}, "no vision_config"),
        ("qwen2_vl", "", {"hidden_act": "swish7"}, "'swish7'"),
        (
            "qwen3_vl",
            "vision_config",
            {"out_hidden_size": 60},
            "embeddings have 60 elements, the decoder's hidden_size is 64",
        ),
        (MOE, "text_config", {"num_experts": None}, "num_experts is missing"),
        (MOE, "text_config", {"num_experts": -1}, "num_experts is -1"),
        (MOE, "text_config", {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, and there are 8 experts"),
        (MOE, "text_config", {"moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        (MOE, "text_config", {"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        (MOE, "text_config", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all'"),
        (MOE, "text_config", {"norm_topk_prob": False}, "norm_topk_prob is false"),
    ],
)
def test_impossible_models_are_refused(tmp_path, family, section, change, message):
    folder = make_checkpoint(family, tmp_path)
    edit_config(folder, change, section)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


EXPERTS = "model.language_model.layers.2.mlp.experts."


def experts_of(folder, **options) -> list[torch.Tensor]:
    """Of all sparse layers: weights [experts, outputs, inputs]."""
    layers = load_model(folder, **options).language_model.layers
    return [weights for index in (0, 2) for weights in layers[index].mlp.experts.weights]


def test_experts_are_read_in_every_layout(tmp_path):
    stored = load_file(make_checkpoint(MOE, tmp_path / "base") / "model.safetensors")
    base = experts_of(tmp_path / "base")
    for weights, name in zip(base[2:], ("gate_up_proj", "down_proj"), strict=True):
        assert torch.equal(weights, stored[EXPERTS + name].transpose(1, 2))
    for layout in ("outputs_first", "each"):
        for dtype in ("float32", "bfloat16"):
            folder = make_checkpoint(MOE, tmp_path / layout / dtype, experts=layout, dtype=dtype, shards=2)
            read = experts_of(folder, dtype=torch.float32)
            assert all(torch.equal(a, b.to(getattr(torch, dtype)).float()) for a, b in zip(read, base, strict=True))


@pytest.mark.parametrize(
    ("made", "change", "message"),
    [
        ("untied", lambda t: t.pop("lm_head.weight"), r"1 missing: lm_head\.weight"),
        (
            "each",
            lambda t: t.pop(EXPERTS + "0.gate_proj.weight"),
            r"1 missing: \S+experts\.0\.gate_proj\.weight \(though up_proj is there\)",
        ),
        (
            "each",
            lambda t: t.update({EXPERTS + "8.down_proj.weight": torch.zeros(64, 40)}),
            r"1 unexpected: \S+experts\.8\.down_proj",
        ),
        (
            "inputs_first",
            lambda t: t.update({EXPERTS + "gate_up_proj": torch.zeros(7, 64, 80)}),
            r"1 of the wrong shape: \S+gate_up_proj is \[7, 64, 80\], not \[8, 64, 80\]",
        ),
        (
            "each",
            lambda t: t.update({EXPERTS + "5.up_proj.weight_scale_inv": torch.zeros(1, 1)}),
            r"1 unexpected: \S+experts\.5\.up_proj\.weight_scale_inv",
        ),
        (
            "each",
            lambda t: t.update({EXPERTS + "5.up_proj.qweight": torch.zeros(1, 1)}),
            r"1 unexpected: \S+experts\.5\.up_proj\.qweight",
        ),
        (
            "inputs_first",
            lambda t: t.update({EXPERTS + "down_proj.qweight": torch.zeros(1, 1)}),
            r"2\.mlp\.experts\.down_proj\.qweight: whole numbers of all experts in one tensor are not supported",
        ),
        ("inputs_first", lambda t: t.pop(EXPERTS[:-8] + "gate.weight"), r"1 missing: \S+2\.mlp\.gate\.weight"),
    ],
    ids=["head", "no-gate", "too-many", "shape", "scale", "quantised", "together", "router"],
)
def test_every_expert_and_the_head_are_accounted_for(tmp_path, made, change, message):
    kind = {"tied": False} if made == "untied" else {"experts": made}
    folder = make_checkpoint("qwen3_vl" if made == "untied" else MOE, tmp_path, **kind)
    edit_weights(folder, change)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


def make_experts(folder, change: dict):
    """A checkpoint with another text_config."""
    make_checkpoint(MOE, folder)
    edit_config(folder, change, "text_config")
    return folder


@pytest.mark.parametrize(
    ("change", "sparse"),
    [
        ({}, {0, 2}),
        ({"mlp_only_layers": None}, {0, 1, 2}),
        ({"mlp_only_layers": [], "decoder_sparse_step": 2}, {1}),
        ({"mlp_only_layers": [2], "decoder_sparse_step": 3}, set()),
        ({"num_experts": None, "num_local_experts": 8}, {0, 2}),
        ({"num_experts": 0}, None),
    ],
    ids=str,
)
def test_which_layers_are_sparse(tmp_path, change, sparse):
    folder = make_experts(tmp_path, change)
    experts = load_config(folder).experts
    if sparse is None:  # all layers are dense
        assert experts is None
        return
    assert (experts.count, experts.chosen, experts.intermediate_size, experts.sparse_layers) == (8, 3, 40, sparse)
