"""Vectors and scores of the offline engine, against `transformers`: whatever chunks, caches and batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tiny_adapters import with_adapter, write_adapter
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.pooled_checkpoints import (
    QUERY,
    WIDTH,
    States,
    embed_prompt,
    make_embedder,
    make_reranker,
    rerank_prompt,
)
from tests.vlmserve.reference import picture
from vlmserve import LLM, TokensPrompt
from vlmserve_common.errors import BadRequestError

TIGHT = {"max_total_tokens": 512, "page_size": 4, "schedule_conservativeness": 0.01, "chunked_prefill_size": 16}
SETTINGS = [
    {},
    {"chunked_prefill_size": 16, "page_size": 1, "disable_overlap_schedule": True},
    {"chunked_prefill_size": -1, "disable_radix_cache": True, "max_running_requests": 2},
    {"tp_size": 2, "chunked_prefill_size": 48, "page_size": 4},
    TIGHT,
]
ANY = pytest.mark.parametrize("settings", SETTINGS)
A, B = picture(1, 96, 64), picture(2, 77, 131)
INPUTS: list[tuple[Any, ...]] = [
    ("a",),
    ("What is in the image?",),
    ("  spaces and\nlines  ",),
    ("Count the shapes. " * 20,),
    (A,),
    (A, "What is this?"),
    ("What is this?", A),
    (B, A, "both"),
]


def llm_of(folder: Path, **settings: Any) -> LLM:
    return LLM(str(folder), num_threads=1, **settings)


def given(parts: tuple[Any, ...]) -> Any:
    """An input as `LLM.embed` takes it."""
    if len(parts) == 1:
        return parts[0] if isinstance(parts[0], str) else {"image": parts[0]}
    content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p} for p in parts]
    return {"content": content}


def close(got: np.ndarray, want: list[np.ndarray]) -> None:
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.fixture(scope="module")
def generator(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    folder = make_checkpoint("qwen3_vl", tmp_path_factory.mktemp("generator"))
    return folder, States(folder)


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    folder = make_embedder(tmp_path_factory.mktemp("embedder"))
    return folder, States(folder)


@ANY
def test_an_embedder_equals_transformers(embedder: tuple[Path, States], settings: dict[str, Any]) -> None:
    folder, reference = embedder
    want = [reference.vector(embed_prompt(*parts), *parts) for parts in INPUTS]
    with llm_of(folder, **settings) as llm:
        for _ in range(2):  # the second time all are cached
            close(llm.embed([given(parts) for parts in INPUTS]), want)
        close(llm.embed(given(INPUTS[5])), want[5:6])  # alone


@ANY
def test_the_mean_of_all_tokens(generator: tuple[Path, States], settings: dict[str, Any]) -> None:
    folder, reference = generator
    want = [reference.vector(parts[0], mean=True) for parts in INPUTS[:4]]
    want += [reference.vector(embed_prompt(*p, instruction=""), *p, mean=True) for p in INPUTS[4:]]
    with llm_of(folder, task="embed", pooling="mean", **settings) as llm:
        for _ in range(2):  # the second time the first tokens must not come from the cache
            close(llm.embed([given(parts) for parts in INPUTS]), want)


def test_a_generating_model_takes_texts_as_they_are(generator: tuple[Path, States]) -> None:
    folder, reference = generator
    with llm_of(folder, task="embed") as llm:
        close(llm.embed(["a", "spaces  "]), [reference.vector("a"), reference.vector("spaces  ")])
        with pytest.raises(
            BadRequestError, match=r"makes embeddings \(POST /v1/embeddings\), and gives no answers \(setting task\)"
        ):
            llm.chat("hi")
    with llm_of(folder) as llm:
        with pytest.raises(BadRequestError, match=r"gives answers .*, no embeddings"):
            llm.embed("a")
        with pytest.raises(BadRequestError, match="no scores of documents"):
            llm.rerank("a", ["b"])


def test_adapters(embedder: tuple[Path, States], tmp_path: Path) -> None:
    folder, plain = embedder
    adapter = write_adapter(folder, tmp_path / "tuned", seed=1)
    tuned = States(with_adapter(folder, adapter, tmp_path / "with"))
    asked = [given(parts) for parts in INPUTS]
    want = {
        name: [reference.vector(embed_prompt(*parts), *parts) for parts in INPUTS]
        for name, reference in ((None, plain), ("tuned", tuned))
    }
    with llm_of(folder, lora_paths=f"tuned={adapter}", enable_lora=True) as llm:
        for name in (None, "tuned", None, "tuned"):
            close(llm.embed(asked, lora=name), want[name])


def test_what_is_asked_of_a_vector(embedder: tuple[Path, States]) -> None:
    folder, reference = embedder
    prompt = embed_prompt("a", instruction=QUERY)
    with llm_of(folder) as llm:
        close(llm.embed("a", instruction=QUERY, dimensions=8), [reference.vector(prompt, dimensions=8)])
        [raw] = llm.embed("a", instruction=QUERY, normalize=False)
        np.testing.assert_allclose(raw, reference.states(prompt)[-1], atol=2e-5)
        ids = tuple(llm.builder.tokenizer.encode("Name a colour."))
        close(llm.embed([TokensPrompt(ids=ids), "a"])[:1], [reference.vector("Name a colour.")])
        assert llm.embed(["a"] * 3).shape == (3, WIDTH)


def test_bad_inputs_are_named(embedder: tuple[Path, States], tmp_path: Path) -> None:
    with llm_of(embedder[0]) as llm:
        for wrong, complaint in (
            ("", r"inputs\[1\]: the text is empty"),
            ({"image": tmp_path / "none.png"}, r"inputs\[1\]: cannot read"),
            ("value " * 2000, r"inputs\[1\]: the prompt has at least"),
            ("<|image_pad|>", r"stands for media in the prompt"),
        ):
            with pytest.raises(BadRequestError, match=complaint) as refused:
                llm.embed(["a", wrong])
            assert refused.value.param == "inputs[1]"
        for dimensions in (0, WIDTH + 1):
            with pytest.raises(BadRequestError, match=f"dimensions is {dimensions}; it must be between 1 and {WIDTH}"):
                llm.embed("a", dimensions=dimensions)
        with pytest.raises(TypeError, match="empty list"):
            llm.embed([])
        with pytest.raises(TypeError, match="an input is a text"):
            llm.embed([7])
        assert llm.embed("a").shape == (1, WIDTH)


def test_texts_that_end_with_a_token_of_their_own(tmp_path: Path) -> None:
    """The reference's tokenizer adds it, too."""
    folder = make_embedder(tmp_path, old=True)
    reference = States(folder)
    with llm_of(folder) as llm:
        close(llm.embed([given(parts) for parts in INPUTS]), [reference.vector(embed_prompt(*p), *p) for p in INPUTS])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def reranker(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, States]:
    folder = make_reranker(tmp_path_factory.mktemp("reranker"), tied=request.param, template=False)
    return folder, States(folder)


@ANY
def test_scores_equal_transformers(reranker: tuple[Path, States], settings: dict[str, Any]) -> None:
    folder, reference = reranker
    with llm_of(folder, **settings) as llm:
        for query in (("Which is red?",), (B,), (B, "like this")):
            want = [reference.score(rerank_prompt(query, parts), *query, *parts) for parts in INPUTS]
            got = llm.rerank(given(query), [given(parts) for parts in INPUTS])
            assert [one.score for one in got] == sorted((one.score for one in got), reverse=True)
            np.testing.assert_allclose([one.score for one in got], [want[one.index] for one in got], atol=1e-5)
        [one] = llm.rerank("Which?", ["a"], instruction=QUERY)
        assert one.score == pytest.approx(reference.score(rerank_prompt(("Which?",), ("a",), QUERY)), abs=1e-5)


def test_a_reranker_has_a_template_of_its_own(tmp_path: Path) -> None:
    folder = make_reranker(tmp_path)
    reference, end = States(folder), "<|im_start|>assistant"
    with llm_of(folder) as llm:
        [plain], [told] = llm.rerank("q", ["d"]), llm.rerank("q", ["d"], instruction=QUERY)
        with pytest.raises(BadRequestError, match=r"documents\[1\]: the text is empty"):
            llm.rerank("q", ["d", ""])
        with pytest.raises(BadRequestError, match="scores documents"):
            llm.embed("a")
    assert plain.score == pytest.approx(reference.score(f"Default.!<query>q<document>d{end}"), abs=1e-5)
    assert told.score == pytest.approx(reference.score(f"{QUERY}!<query>q<document>d{end}"), abs=1e-5)
