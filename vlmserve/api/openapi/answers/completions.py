"""What POST /v1/completions, /v1/score, /tokenize and /detokenize answer."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from vlmserve.api.openapi.answers.chat import PromptLogprobs, PromptTokensDetails, Usage


class LogprobColumns(TypedDict):
    """One entry for each token. text_offset: characters of the choice's text before it."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """stop_reason: the stop string that was found."""

    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None
    prompt_logprobs: NotRequired[PromptLogprobs]


class TextCompletion(TypedDict):
    """The answers to all prompts."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: Usage


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[str | None]


class TextCompletionChunk(TypedDict):
    """A part of streamed answers; the last one has the usage, if it was asked for."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]


class ScoreUsage(TypedDict):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class Scores(TypedDict):
    """For each item, of each label: its score and its logprob."""

    id: str
    object: Literal["scoring"]
    created: int
    model: str
    scores: list[list[float]]
    logprobs: list[list[float]]
    usage: ScoreUsage


class TokenizedPrompt(TypedDict):
    """token_strs: with return_token_strs."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedPrompt(TypedDict):
    prompt: str
