"""The stand-in for FlashInfer takes what the real wrappers take: their signatures, copied from two releases."""

from __future__ import annotations

import importlib.util
import inspect
from inspect import Parameter, Signature

import pytest

from tests.vlmserve.models.attention import fake_flashinfer

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
SCALES = "q_scale=None, k_scale=None, v_scale=None, out=None, lse=None, return_lse=False"
PLACES = "pos_encoding_mode='NONE', window_left=-1, logits_soft_cap=None"
DTYPES = "q_data_type='float16', kv_data_type=None, o_data_type=None"
DECODE_INIT = """self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, use_tensor_cores=False,
    paged_kv_indptr_buffer=None, paged_kv_indices_buffer=None, paged_kv_last_page_len_buffer=None, backend='auto',
    jit_args=None"""
DECODE_PLAN = "self, indptr, indices, last_page_len, num_qo_heads, num_kv_heads, head_dim, page_size"
PREFILL_INIT = """self, float_workspace_buffer, kv_layout='NHD', use_cuda_graph=False, qo_indptr_buf=None,
    paged_kv_indptr_buf=None, paged_kv_indices_buf=None, paged_kv_last_page_len_buf=None, custom_mask_buf=None,
    mask_indptr_buf=None, backend='auto', jit_args=None, jit_kwargs=None"""
PREFILL_PLAN = f"""self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, num_qo_heads,
    num_kv_heads, head_dim_qk, page_size, head_dim_vo=None, custom_mask=None, packed_custom_mask=None, causal=False,
    pos_encoding_mode='NONE', use_fp16_qk_reduction=False, sm_scale=None, window_left=-1, logits_soft_cap=None,
    rope_scale=None, rope_theta=None, {DTYPES}, non_blocking=True"""
RESET = "self, float_workspace_buffer, int_workspace_buffer"
_0_6_6 = {
    (DECODE, "__init__"): DECODE_INIT,
    (DECODE, "plan"): f"{DECODE_PLAN}, {PLACES}, {DTYPES}, data_type=None, sm_scale=None, rope_scale=None",
    (DECODE, "run"): f"self, q, paged_kv_cache, *args, {SCALES}",
    (DECODE, "reset_workspace_buffer"): RESET,
    (PREFILL, "__init__"): PREFILL_INIT,
    (PREFILL, "plan"): PREFILL_PLAN,
    (PREFILL, "run"): f"self, q, paged_kv_cache, *args, {SCALES}",
    (PREFILL, "reset_workspace_buffer"): RESET,
}
_0_7_2 = {
    # `plan` takes what follows the page size by keyword only, and hands it to `_plan_impl`
    (DECODE, "plan"): f"{DECODE_PLAN}, *, {PLACES}, window_right=0, {DTYPES}, data_type=None, sm_scale=None",
    (PREFILL, "__init__"): f"{PREFILL_INIT}, variant_owns_mask=False",
}
REAL = {"0.6.6": _0_6_6, "0.7.2": _0_6_6 | _0_7_2}
"""Version -> (class, method) -> parameters, up to the last one that the stand-in has, without their types."""


def check(stand_in: Signature, real: Signature) -> None:
    """Assert that every call that fits the stand-in fits the real method, and means the same."""
    theirs = list(real.parameters.values())
    any_keyword = any(parameter.kind == Parameter.VAR_KEYWORD for parameter in theirs)
    for place, own in enumerate(stand_in.parameters.values()):
        other = real.parameters.get(own.name)
        if own.kind == Parameter.POSITIONAL_OR_KEYWORD:
            assert other is theirs[place], f"{own.name} is not at place {place}"
            assert other.kind == Parameter.POSITIONAL_OR_KEYWORD, own.name
        assert other is not None or any_keyword, f"there is no {own.name}"
        if other is not None and own.default is not Parameter.empty:
            assert own.default == other.default, own.name
    plain = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)
    needed = {other.name for other in theirs if other.kind in plain and other.default is Parameter.empty}
    assert needed <= stand_in.parameters.keys()


def written(parameters: str) -> Signature:
    return inspect.signature(eval(f"(lambda {parameters}: None)"))


def signature(kind: str, method: str) -> Signature:
    return inspect.signature(getattr(getattr(fake_flashinfer, kind), method))


@pytest.mark.parametrize("version", REAL)
def test_the_stand_in_has_the_signatures_of_a_release(version):
    for (kind, method), parameters in REAL[version].items():
        check(signature(kind, method), written(parameters))


@pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="FlashInfer is not installed")
def test_the_stand_in_has_the_signatures_of_the_installed_package():
    import flashinfer

    for kind, method in REAL["0.7.2"]:
        check(signature(kind, method), inspect.signature(getattr(getattr(flashinfer, kind), method)))
