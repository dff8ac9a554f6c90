"""Sparse MLPs: routing and experts are those of transformers, with our operators and without, in all layouts."""

from __future__ import annotations

import pytest
import torch

from tests import hf_env  # noqa: F401
from vlmserve_common.checkpoint.weights import stored_tensors
from vlmserve_common.compute.activations import activation
from vlmserve_common.compute.expert_part import part_of_experts
from vlmserve_common.compute.experts import Experts, SparseMLP, choose_layouts, pack_experts
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import library

SIZE, INNER, EXPERTS, CHOSEN = 48, 40, 6, 3


@pytest.fixture(params=["torch", "operators"])
def with_operators(request):
    """Whether the process has our operators."""
    if request.param == "operators":
        said = library.activate("auto", threads=1)
        if library.active() is None:
            pytest.skip(said)
    else:
        library.activate("off", threads=1)
    return request.param == "operators"


def make(dtype: torch.dtype = torch.float32) -> SparseMLP:
    mlp = SparseMLP(SIZE, INNER, EXPERTS, CHOSEN, activation("silu")).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for parameter in mlp.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * 1.5 / parameter.shape[-1] ** 0.5)
    return mlp


def reference_of(mlp: SparseMLP) -> torch.nn.Module:
    from transformers import Qwen3VLMoeTextConfig
    from transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe import Qwen3VLMoeTextSparseMoeBlock

    config = Qwen3VLMoeTextConfig(
        hidden_size=SIZE, moe_intermediate_size=INNER, num_experts=EXPERTS, num_experts_per_tok=CHOSEN
    )
    config._experts_implementation = "eager"
    block = Qwen3VLMoeTextSparseMoeBlock(config).to(mlp.gate.dtype)
    block.load_state_dict(mlp.state_dict())
    return block


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 33, 200])
def test_transformers_block(with_operators, rows):
    mlp = make()
    reference = reference_of(mlp)
    pack_linears(mlp)
    pack_experts(mlp)
    assert (mlp.experts.packed is not None) == with_operators
    x = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(1))
    residual = torch.randn(rows, SIZE, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(mlp(x), reference(x[None])[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mlp(x, residual.clone()), residual + reference(x[None])[0], rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_experts_that_are_elsewhere_add_nothing(with_operators):
    mlp = make()
    x = torch.randn(33, SIZE, generator=torch.Generator().manual_seed(1))
    ids, scores = mlp.gate.choose(x)
    parts = [mlp.experts(x, (ids.masked_fill(ids % 2 == odd, -1), scores)) for odd in (0, 1)]
    whole = mlp.experts(x, (ids, scores))
    pack_experts(mlp)
    packed = [mlp.experts(x, (ids.masked_fill(ids % 2 == odd, -1), scores)) for odd in (0, 1)]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(packed, parts, rtol=1e-5, atol=1e-5)


@torch.inference_mode()
def test_in_bfloat16_routing_rounds_where_transformers_does(with_operators):
    mlp = make(torch.bfloat16)
    reference = reference_of(mlp)
    pack_linears(mlp, "int8")  # which leaves the router as it is
    x = torch.randn(200, SIZE, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    logits, wanted_scores, wanted = reference.gate(x)
    ids, scores = mlp.gate.choose(x)
    edges = logits.float().sort(descending=True).values[:, CHOSEN - 1 : CHOSEN + 1]
    clear = edges[:, 0] - edges[:, 1] > 0.05  # the last bit of a logit decides nothing
    assert clear.sum() > 150
    assert torch.equal(ids[clear].sort().values, wanted[clear].sort().values)
    assert scores.dtype == torch.bfloat16
    assert (scores[clear] == wanted_scores[clear]).float().mean() > 0.9
    torch.testing.assert_close(scores[clear], wanted_scores[clear], rtol=0.03, atol=0)


@pytest.mark.parametrize("layout", ["inputs_first", "outputs_first", "each"])
@pytest.mark.parametrize("sizes", [(48, 40), (48, 24), (40, 40)], ids=str)
def test_every_layout_is_known_by_its_shapes(layout, sizes):
    """Also where one of the two weights is square."""
    stored, read = (
        torch.nn.ModuleDict({"mlp": Experts(part_of_experts(3, sizes[1]), sizes[0], activation("silu"))})
        for _ in range(2)
    )
    stored["mlp"].lay_out(layout)
    shapes = {name: tuple(view.shape) for name, view in stored_tensors(stored)}
    choose_layouts(read, shapes)
    assert read["mlp"].layout == layout
    assert {name: tuple(view.shape) for name, view in stored_tensors(read)} == shapes
