"""What a checkpoint is served for, by its files and by the settings."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint, make_tokenizer
from tests.vlmserve.pooled_checkpoints import (
    INSTRUCTION,
    NO,
    QUERY,
    YES,
    make_embedder,
    make_reranker,
    rerank_prompt,
    write,
)
from vlmserve.frontend.chat_template import PairTemplate
from vlmserve.frontend.sampling import verify_dimensions
from vlmserve.frontend.tasks import Task, load_template, read_task, with_instruction
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer, load_text_tokenizer
from vlmserve_common.errors import BadRequestError, CheckpointError

TOKENIZER = TextTokenizer(make_tokenizer())
EMBEDDER = Task(
    name="embed",
    templated=True,
    prompts={"query": QUERY, "document": INSTRUCTION},
    instruction=INSTRUCTION,
)


def read(folder: Path, name: str = "auto", pooling: str = "auto") -> Task:
    return read_task(folder, name, pooling, TOKENIZER)


@pytest.mark.parametrize("old", [False, True])
def test_an_embedder_is_recognised(tmp_path: Path, old: bool) -> None:
    assert read(make_embedder(tmp_path, old=old)) == EMBEDDER
    assert read(tmp_path, pooling="mean") == dataclasses.replace(EMBEDDER, pooling="mean")
    assert read(tmp_path, "generate") == Task()
    make_embedder(tmp_path, old=old, pooling="mean_tokens" if old else "mean", normalize=False)
    assert read(tmp_path) == dataclasses.replace(EMBEDDER, pooling="mean", normalize=False)


def test_a_reranker_is_recognised(tmp_path: Path) -> None:
    assert read(make_reranker(tmp_path)) == Task(name="rerank", labels=(YES, NO))
    assert read(tmp_path, "embed") == Task(name="embed")


def test_a_generating_model_does_what_it_is_told(tmp_path: Path) -> None:
    make_checkpoint("qwen3_vl", tmp_path)
    assert read(tmp_path) == Task()
    assert read(tmp_path, "embed", "mean") == Task(name="embed", pooling="mean")
    with pytest.raises(CheckpointError, match="no tokens for yes and no"):
        read(tmp_path, "rerank")
    with pytest.raises(CheckpointError, match=r"--pooling is mean, which is for embeddings \(setting --task embed\)"):
        read(tmp_path, pooling="mean")


def test_files_that_cannot_be_followed(tmp_path: Path) -> None:
    for pooling in ("cls_token", "mean_sqrt_len_tokens"):
        with pytest.raises(CheckpointError, match=f"pooling {pooling} is not supported"):
            read(make_embedder(tmp_path, pooling=pooling))
    write(tmp_path / "1_Pooling" / "config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": True})
    with pytest.raises(CheckpointError, match=r"pooling lasttoken \+ mean_tokens is not supported"):
        read(tmp_path)
    write(tmp_path / "modules.json", [{"type": "a.Transformer"}, {"type": "a.b.Dense", "path": "2_Dense"}])
    with pytest.raises(CheckpointError, match="the module Dense, which is not supported"):
        read(tmp_path)
    for content in ({"type": "a"}, [{"path": "1"}]):
        write(tmp_path / "modules.json", content)
        with pytest.raises(CheckpointError, match="must be a list of objects with a type"):
            read(tmp_path)
    (tmp_path / "modules.json").write_text("[")
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        read(tmp_path)


def test_a_reranker_without_a_template_has_the_published_prompt(tmp_path: Path) -> None:
    task = read(make_reranker(tmp_path, template=False))
    template = load_template(tmp_path, None, task)
    pair = [
        {"role": "user", "content": "q"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "d"}]},
    ]
    assert template.render(pair) == rerank_prompt(("q",), (0, "d"))
    assert template.render(with_instruction(pair, task, "Do.")) == rerank_prompt(("q",), (0, "d"), "Do.")
    given = load_template(tmp_path, "{{ messages[-2].role }} {{ messages[-1].role }}", task)
    assert isinstance(given, PairTemplate)
    assert given.render(pair) == "query document"
    with pytest.raises(BadRequestError, match="two messages"):
        given.render(pair[:1])


def test_instructions() -> None:
    said = {"role": "user", "content": "a"}
    assert with_instruction([said], EMBEDDER) == [{"role": "system", "content": INSTRUCTION}, said]
    assert with_instruction([said], EMBEDDER, QUERY)[0]["content"] == QUERY
    for messages in ([], [{"role": "system", "content": "mine"}, said], [{"role": "developer", "content": "mine"}]):
        assert with_instruction(messages, EMBEDDER, QUERY) == messages
    assert with_instruction([said], Task(name="embed")) == [said]


def test_a_tokenizer_may_end_texts(tmp_path: Path) -> None:
    tokenizer = load_text_tokenizer(make_embedder(tmp_path, old=True))
    end = tokenizer.id_of("<|endoftext|>")
    for text in ("a", "a" * 5000):  # short and long ones take different ways
        assert tokenizer.encode(text, add_special_tokens=True) == [*tokenizer.encode(text), end]
    assert TOKENIZER.encode("a", add_special_tokens=True) == TOKENIZER.encode("a")


def test_dimensions() -> None:
    for dimensions, trained in ((None, ()), (1, ()), (64, ()), (32, (16, 32))):
        verify_dimensions(dimensions, 64, trained)
    for wrong, trained, allowed in (
        (0, (), "between 1 and 64"),
        (65, (), "between 1 and 64"),
        (8, (16, 32), "one of 16, 32"),
    ):
        with pytest.raises(BadRequestError, match=f"dimensions is {wrong}; it must be {allowed}"):
            verify_dimensions(wrong, 64, trained)
