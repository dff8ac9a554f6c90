"""Checkpoints of a few bits, whole: answers are those of transformers on the same numbers, dequantised."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.fake_graphs import CallsAgain
from tests.omni_checkpoints import make_omni_checkpoint
from tests.quantized_checkpoints import make_quantized
from tests.text_checkpoints import make_text_checkpoint
from tests.tiny_adapters import with_adapter, write_adapter
from tests.tiny_checkpoints import HYBRID_MOE, MOE, make_checkpoint
from tests.vlmserve import test_omni, test_text_models
from tests.vlmserve.executor.captured import capture_steps
from tests.vlmserve.models.test_expert_parts import experts_of
from tests.vlmserve.models.test_quantized_experts import SIZES
from tests.vlmserve.reference import Answer, Reference, assert_equal_answers, conversations
from vlmserve import LLM, SamplingOverrides

NEW = 8
GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=NEW, ignore_eos=True)
TRITON = {"cpu_kernels": "off", "gpu_kernels": "triton"}
FORMS = {MOE: "awq", HYBRID_MOE: "gptq", "qwen3_moe": "compressed-tensors"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"chunked_prefill_size": 16, "page_size": 4},
    {"tp_size": 2},
    {"tp_size": 2, "ep_size": 2},
    TRITON,
    TRITON | {"tp_size": 2},
]


@pytest.fixture(scope="module")
def family(request, tmp_path_factory) -> tuple[Path, list, list[Answer]]:
    """A quantised checkpoint, conversations, and what transformers answers on its numbers."""
    name, base = request.param, tmp_path_factory.mktemp(request.param)
    if name == "qwen3_moe":
        made, same = make_quantized(make_text_checkpoint(name, base / "plain"), base, FORMS[name])
        return made, test_text_models.ASKED, [test_text_models.answer(same, one) for one in test_text_models.ASKED]
    router = r"mlp\.gate\.weight" if name == HYBRID_MOE else "$^"
    plain = make_checkpoint(name, base / "plain", sizes=SIZES)
    made, same = make_quantized(plain, base, FORMS[name], also=router)
    asked, reference = conversations()[:8], Reference(same)
    return made, asked, [reference.answer(messages, NEW) for messages in asked]


def cells() -> list[Any]:
    quick = [(MOE, SETTINGS[0])]
    return [
        pytest.param(name, one, marks=() if (name, one) in quick else pytest.mark.slow)
        for name in FORMS
        for one in SETTINGS
        if name != "qwen3_moe" or "gpu_kernels" not in one  # whose experts have 40 inner elements
    ]


@pytest.mark.parametrize(("family", "settings"), cells(), indirect=["family"], ids=str)
def test_answers_are_those_of_transformers(family, settings):
    folder, asked, wanted = family
    new = NEW
    if "gpu_kernels" in settings:  # which are interpreted
        new, asked, wanted = 3, asked[:2], wanted[:2]
    greedy = replace(GREEDY, max_new_tokens=new)
    wanted = [replace(w, token_ids=w.token_ids[:new], logprobs=w.logprobs[:new]) for w in wanted]
    with LLM(str(folder), dtype="float32", num_threads=1, max_total_tokens=4096, **settings) as llm:
        if "tp_size" not in settings:
            experts = experts_of(llm._runner.model)
            assert all((one.ints if "gpu_kernels" in settings else one.packed) is not None for one in experts)
        for got, want in zip(llm.chat_batch(asked, greedy, num_logprobs=1), wanted, strict=True):
            assert_equal_answers(got, want)
        for messages, want in [*zip(asked, wanted, strict=True)][:3] if new == NEW else ():
            assert_equal_answers(llm.chat(messages, greedy, num_logprobs=1), want)


@pytest.mark.slow
def test_an_omni_thinker(tmp_path):
    plain = make_omni_checkpoint("qwen3_omni_moe", tmp_path / "plain")
    made, same = make_quantized(plain, tmp_path, "awq")
    reference = test_omni.Reference(same)
    with test_omni.load(made, num_threads=1) as llm:
        assert all(one.packed is not None for one in experts_of(llm._runner.model))
        for name in ("sound", "picture and sound", "clip with sound"):
            length, ids, logprobs = reference.answer(test_omni.CASES[name])
            got = test_omni.asked(llm, test_omni.CASES[name])
            assert (got.prompt_tokens, list(got.token_ids)) == (length, ids)
            assert [one.logprob for one in got.logprobs] == pytest.approx(logprobs, abs=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kernels", [{}, TRITON], ids=["operators", "triton"])
def test_adapters_beside_weights_of_a_few_bits(tmp_path, kernels):
    """By a captured step, too."""
    made, same = make_quantized(make_checkpoint("qwen3_vl", tmp_path / "plain"), tmp_path, "awq")
    adapter = write_adapter(same, tmp_path / "adapter", seed=1, modules=r".*layers\..*", rename=str)
    changed = with_adapter(same, adapter, tmp_path / "changed")
    asked = conversations()[0]
    plain, adapted = (Reference(one).answer(asked, NEW) for one in (same, changed))
    assert plain.token_ids != adapted.token_ids
    with LLM(str(made), dtype="float32", num_threads=1, enable_lora=True, max_total_tokens=2048, **kernels) as llm:
        llm.load_lora_adapter("one", adapter)

        def check(count: int) -> None:
            greedy = replace(GREEDY, max_new_tokens=count)
            got = llm.chat_batch([asked, asked], greedy, loras=[None, "one"])
            assert [list(one.token_ids) for one in got] == [w.token_ids[:count] for w in (plain, adapted)]

        check(NEW)
        if kernels:
            capturer = CallsAgain()
            capture_steps(llm, (2,), capturer, most_adapters=2)
            check(4)
            assert capturer.replayed == 3
