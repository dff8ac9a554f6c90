"""Parts of quantised checkpoints compute together what the whole does, wherever blocks, groups and words are cut."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests import hf_env  # noqa: F401
from tests.fp8_checkpoints import FORMS, make_fp8
from tests.quantized_checkpoints import FORMATS, make_quantized
from tests.rank_threads import at_all
from tests.vlmserve.models.dense_attention import assert_close, distance_of, logits_of
from tests.vlmserve.models.test_fp8 import kept
from tests.vlmserve.models.test_quantized import kinds
from vlmserve.models.registry import load_model, outline_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels import library

SIZES = (2, 4)
# With 4 parts, inputs of down_proj are 24, and of o_proj 16; a part of the outputs of k_proj is 16
CUT_INSIDE = (24, 40)


def together(
    folder: Path, size: int, compute: Callable[[VisionLanguageModel], torch.Tensor] = logits_of, **how
) -> tuple[torch.Tensor, list[VisionLanguageModel]]:
    """What the first part computes together with all others, each in a thread of its own, and all parts."""

    def work(comm: Communicator) -> tuple[torch.Tensor, VisionLanguageModel]:
        model = load_model(folder, comm=comm, **how)
        return compute(model), model

    done = at_all(size, work)
    return done[0][0], [model for _, model in done]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("block", [(8, 8), CUT_INSIDE, (128, 128)])
def test_blocks_of_8_bit_floats_that_are_cut(plain, tmp_path, block, size):
    made, same = make_fp8(plain, tmp_path, "block", block=block)
    assert_close(together(made, size)[0], logits_of(load_model(same)))


@pytest.mark.parametrize("form", [form for form in FORMS if form != "block"])
def test_scales_of_outputs_and_tensors(plain, tmp_path, form):
    made, same = make_fp8(plain, tmp_path, form)
    assert_close(together(made, 2)[0], logits_of(load_model(same)))


@pytest.mark.parametrize(("form", "block"), [("block", (8, 8)), ("block", CUT_INSIDE), ("channel", (1, 1))])
@pytest.mark.usefixtures("exact_inputs")
def test_parts_that_stay_8_bit_floats(plain, tmp_path, form, block):
    """Without the rounding of inputs, which is by rows of a part, they compute what the whole does."""
    made, same = make_fp8(plain, tmp_path, form, block=block)
    logits, parts = together(made, 4, keep_fp8=True)
    assert [kept(part) for part in parts] == [12] * 4
    assert_close(logits, logits_of(load_model(same)))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", FORMATS)
def test_whole_numbers_stay_packed(plain, tmp_path, kernels, form, size):
    """Groups of 32 are cut where inputs of a part are 48, 24 or 16."""
    made, same = make_quantized(plain, tmp_path, form)
    logits, parts = together(made, size)
    expected = "plain" if kernels == "torch" else "int8" if form == "gptq-8" else "int4"
    assert [kinds(part) for part in parts] == [{expected}] * size
    assert_close(logits, logits_of(load_model(same)))


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("form", ["gptq", "compressed-tensors"])
def test_one_group_for_all_inputs(plain, tmp_path, form):
    made, same = make_quantized(plain, tmp_path, form, group=96)
    edit(made, 96, -1)
    assert_close(together(made, 2)[0], logits_of(load_model(same)))


def edit(folder: Path, group: int, other: int) -> None:
    """Have a configuration say another group size."""
    config = (folder / "config.json").read_text()
    assert f'"group_size": {group}' in config
    (folder / "config.json").write_text(config.replace(f'"group_size": {group}', f'"group_size": {other}'))


@pytest.mark.parametrize("form", ["gptq", "gptq-8"])
def test_groups_in_no_order(plain, tmp_path, form):
    made, same = make_quantized(plain, tmp_path, form, shuffled=True)
    assert_close(together(made, 4)[0], logits_of(load_model(same)))


def test_a_wrong_shape_is_told_in_the_checkpoint_s_own_numbers(plain, tmp_path):
    made, _ = make_quantized(plain, tmp_path, "awq")
    edit(made, 32, 16)
    with pytest.raises(CheckpointError, match=r"qzeros is \[2, 8\] of torch.int32, not \[4, 8\]"):
        outline_model(made, shard=Shard(1, 2))


@pytest.mark.parametrize("mode", ["int8", "int4"])
def test_parts_are_quantised_at_the_start_as_the_whole_is(plain, mode):
    def quantised(model: VisionLanguageModel) -> torch.Tensor:
        model.pack(mode)
        return logits_of(model)

    truth = logits_of(load_model(plain))
    library.activate("auto", threads=1)
    try:
        logits, parts = together(plain, 2, quantised)
        assert [kinds(part) for part in parts] == [{mode}] * 2
    finally:
        library.activate("off", threads=1)
    assert 0 < distance_of(logits, truth) < (3e-3 if mode == "int8" else 0.6)


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.usefixtures("exact_inputs")
def test_scales_of_the_kv_cache_change_nothing_but_the_cache(plain, tmp_path, keep):
    made, same = make_fp8(plain, tmp_path, "block", block=CUT_INSIDE)
    unscaled = load_model(made).language_model.layers[0].self_attn.o_proj.weight[:, 32:]
    tensors = load_file(made / "model.safetensors")
    for layer in range(3):
        tensors[f"model.layers.{layer}.self_attn.k_scale"] = torch.tensor(0.3)
        tensors[f"model.layers.{layer}.self_attn.v_scale"] = torch.tensor(3.0)
    save_file(tensors, made / "model.safetensors", metadata={"format": "pt"})
    logits, parts = together(made, 2, keep_fp8=keep)
    assert_close(logits, logits_of(load_model(same)))
    if not keep:
        assert torch.equal(parts[1].language_model.layers[0].self_attn.o_proj.weight, 4 * unscaled)
