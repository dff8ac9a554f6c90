"""Requests for embeddings and scores, for the server and for the offline `LLM`: their prompts and what they return."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from vlmserve.frontend.chat_messages import FindFile
from vlmserve.frontend.requests import ChatPrompt, Prompt, TextPrompt
from vlmserve.frontend.tasks import Task, with_instruction
from vlmserve.ipc.messages import Pooling, ReturnOptions, SamplingParams, TokenLogprobs
from vlmserve_common.errors import BadRequestError

Content: TypeAlias = str | Sequence[Any]
"""A text, or parts of a message."""

_NO_TOKEN = SamplingParams(max_new_tokens=0, temperature=0.0)
_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


def embed_fields(task: Task, *, dimensions: int | None = None, normalize: bool | None = None) -> dict[str, Any]:
    """Return the fields of a `GenerateReqInput` that ask for a vector. dimensions, normalize: see `Pooling`; None: the
    model's own."""
    normalize = task.normalize if normalize is None else normalize
    pooling = Pooling(how=task.pooling, dimensions=dimensions, normalize=normalize)
    return {"task": "embed", "sampling_params": _NO_TOKEN, "returns": ReturnOptions(pooling=pooling)}


def rerank_fields(task: Task) -> dict[str, Any]:
    """Return the fields of a `GenerateReqInput` that ask for what `relevance` reads."""
    returns = ReturnOptions(token_ids_logprob=task.labels)
    return {"task": "rerank", "sampling_params": _ONE_TOKEN, "returns": returns}


def embed_prompt(
    task: Task, content: Content, instruction: str | None = None, find_file: FindFile | None = None
) -> Prompt:
    """Return the prompt of one input. instruction: in place of the checkpoint's. Raises BadRequestError for an empty
    text."""
    check_content(content)
    if isinstance(content, str) and not task.templated and instruction is None:
        return TextPrompt(text=content, add_special_tokens=True)
    return ChatPrompt(
        messages=with_instruction([{"role": "user", "content": content}], task, instruction),
        find_file=find_file,
        add_special_tokens=True,
    )


def rerank_prompt(
    task: Task, query: Content, document: Content, instruction: str | None = None, find_file: FindFile | None = None
) -> ChatPrompt:
    """Return the prompt of a pair, see `PairTemplate`. Raises BadRequestError for an empty text."""
    check_content(query)
    check_content(document)
    pair = [{"role": "user", "content": content} for content in (query, document)]
    return ChatPrompt(messages=with_instruction(pair, task, instruction), find_file=find_file, add_special_tokens=True)


def relevance(logprobs: Sequence[TokenLogprobs] | None) -> float:
    """Return the score of a document, between 0 and 1, from the logprobs of an answer's first token: the sigmoid of the
    difference of the two labels' logits."""
    assert logprobs is not None
    yes, no = logprobs[0].token_ids_logprobs
    return 1 / (1 + math.exp(no - yes)) if no < yes else math.exp(yes - no) / (1 + math.exp(yes - no))


def check_content(content: Content) -> None:
    """Raise BadRequestError for an empty text, and for no parts."""
    if not content:
        raise BadRequestError("the text is empty", code="invalid_value")
