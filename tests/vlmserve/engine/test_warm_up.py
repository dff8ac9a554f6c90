"""Steps before the first request: they have every kernel built that requests need, and change no answer."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpretedFunction

from tests.tiny_checkpoints import HYBRID, make_checkpoint
from vlmserve import LLM, SamplingOverrides
from vlmserve.engine.warm_up import warm_up
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.gpu.common import INTERPRETED

SETTINGS: dict[str, Any] = {"num_threads": 1, "cpu_kernels": "off", "chunked_prefill_size": 32}
MIXED = {"enable_mixed_chunk": True, "max_running_requests": 3}
# Prompts are taken by 32 tokens: some numbers are multiples of 16, for which kernels are built anew, unless they are
# told not to.
SAMPLED = [
    {"temperature": 0.0},
    {"temperature": 1.0, "top_k": 1, "seed": 2},
    {"temperature": 1.0, "top_k": 16, "seed": 3},
    {"temperature": 1.0, "top_p": 0.8, "seed": 4},
    {"temperature": 1.0, "seed": 5, "repetition_penalty": 1.2},
]


def _specialised(value: Any) -> object:
    """What Triton builds a kernel anew for."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.storage_offset() * value.element_size() % 16 == 0
    return (value == 1, value % 16 == 0) if isinstance(value, int) else type(value)


@contextmanager
def builds() -> Iterator[set[tuple[object, ...]]]:
    """A set of the builds that launches ask for. What samples is run, of all else the results are zeros: the
    interpreter is slow."""
    asked: set[tuple[object, ...]] = set()
    run = InterpretedFunction.run

    def noting(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        parameters = inspect.signature(kernel.fn).parameters
        loose = kernel.kwargs["do_not_specialize"] or ()
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        key = [
            given[name] if parameter.annotation == "tl.constexpr" else name in loose or _specialised(given[name])
            for name, parameter in parameters.items()
        ]
        asked.add((kernel.__name__, *key))
        if kernel.__name__ in ("noisy_best_kernel", "best_of_splits_kernel"):
            run(kernel, *args, grid=grid, warmup=warmup, **kwargs)
        else:
            for name in {"q", "out"} & given.keys():
                given[name].zero_()

    # a trial would find zeros, and what it finds is remembered for all tests of this process
    trusted = mock.patch.object(fused, "delta_kernels_work", return_value=True)
    with mock.patch.object(InterpretedFunction, "run", noting), trusted:
        yield asked


def answers(llm: LLM) -> list[tuple[int, ...]]:
    asked = [[{"role": "user", "content": content}] for content in ("Count.", "Two circles. Why?" * 6)]
    return [
        answer.token_ids
        for way in SAMPLED
        for answer in llm.chat_batch(asked, SamplingOverrides(max_new_tokens=3, ignore_eos=True, **way))
    ]


@pytest.mark.skipif(not INTERPRETED, reason="a GPU has no interpreter, and is warmed up before it serves")
@pytest.mark.parametrize("family", ["qwen3_vl", HYBRID])
def test_requests_find_all_kernels_built(tmp_path, family):
    folder = str(make_checkpoint(family, tmp_path))
    try:
        with (
            LLM(folder, attention_backend="triton", gpu_kernels="triton", **SETTINGS, **MIXED) as llm,
            builds() as asked,
        ):
            warm_up(llm._runner, with_tower=True)
            at_start = set(asked)
            answers(llm)
    finally:
        fused.activate("torch", torch.device("cpu"))
    assert asked - at_start == set()
    kinds = {name for name, *_ in at_start}
    assert {"split_kernel", "extend_kernel", "position_and_store_kernel", "noisy_best_kernel"} <= kinds
    assert ("follow_kernel" in kinds) is (family == HYBRID)


@pytest.mark.parametrize("family", ["qwen3_vl", HYBRID])
def test_it_changes_no_answer(tmp_path, family):
    folder = str(make_checkpoint(family, tmp_path))
    with LLM(folder, **SETTINGS) as llm:
        wanted = answers(llm)
        llm.flush_cache()
        warm_up(llm._runner, with_tower=True)
        assert answers(llm) == wanted


@pytest.mark.parametrize(
    "pool", [{"max_total_tokens": 32}, {"max_running_requests": 1, "page_size": 4, "max_model_len": 4}]
)
def test_small_pools(tmp_path, pool):
    """One page for requests, or one short request."""
    with LLM(str(make_checkpoint("qwen2_vl", tmp_path)), num_threads=1, cpu_kernels="off", **pool) as llm:
        warm_up(llm._runner, with_tower=True)
        [answer] = llm.generate("a", SamplingOverrides(max_new_tokens=2, ignore_eos=True))
        assert len(answer.token_ids) == 2
