"""The types of chat and text completions, whole and in chunks, as the OpenAPI document shows them."""

from __future__ import annotations

from typing import Literal, NotRequired

from typing_extensions import TypedDict

from processors.families.base import Coordinates
from processors.families.report import AudioReport, PruningReport, VideoReport
from processors.knobs import Clamp
from vlmserve.frontend.request_stats import Timings

FinishType = Literal["stop", "length", "tool_calls"]


# ---- log-probabilities


class NamedLogprob(TypedDict):
    """A token. bytes: the bytes of its text, which may be a part of a character."""

    token: str
    logprob: float
    bytes: list[int]


class AnswerLogprob(NamedLogprob):
    """A token of the answer. token_ids_logprobs: the logprobs of the tokens that the request names."""

    top_logprobs: list[NamedLogprob]
    token_ids_logprobs: NotRequired[list[float]]


class ChoiceLogprobs(TypedDict):
    content: list[AnswerLogprob]
    refusal: None


class PromptLogprob(TypedDict):
    """A token at a position of the prompt. rank: 1 for the likeliest token."""

    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


# ---- figures


class Size(TypedDict):
    """Width and height in pixels."""

    width: int
    height: int


class Scale(TypedDict):
    x: float
    y: float


class MediumInfo(TypedDict):
    """How a picture, video or sound was prepared. scale: pixels of the source in one pixel of the resized picture.
    audio: of a sound, or of a video that is heard, too."""

    kind: Literal["image", "video", "audio"]
    param: str
    source_size: Size
    final_size: Size
    scale: Scale
    grid_thw: tuple[int, int, int]
    tokens: int
    coordinates: Coordinates
    clamps: list[Clamp]
    ignored: list[str]
    video: VideoReport | None
    pruning: PruningReport | None
    audio: AudioReport | None


class MediaReport(TypedDict):
    """The reports on the request's media, in the order of its prompt."""

    media: list[MediumInfo]


class PromptTokensDetails(TypedDict):
    """The kinds of the prompt's tokens; all but the first come with return_usage_details. pruned_tokens: those that
    left media, if a medium was to have fewer."""

    cached_tokens: int
    text_tokens: NotRequired[int]
    image_tokens: NotRequired[int]
    video_tokens: NotRequired[int]
    pruned_tokens: NotRequired[int]
    audio_tokens: NotRequired[int]


class GuessedTokens(TypedDict):
    """Guessed tokens of an answer, if there were any: right ones, which are part of it, and wrong ones."""

    accepted_prediction_tokens: NotRequired[int]
    rejected_prediction_tokens: NotRequired[int]


class CompletionTokensDetails(GuessedTokens):
    reasoning_tokens: NotRequired[int]


class SpecTokensDetails(TypedDict):
    """Figures of guessed tokens. spec_verify_ct: steps with guesses. spec_accept_length: mean tokens of these steps; 0
    if there were none."""

    spec_verify_ct: int
    spec_num_proposed_drafts: int
    spec_num_correct_drafts: int
    spec_num_correct_drafts_per_pos: list[int]
    spec_accept_length: float


class MoreUsage(TypedDict):
    """Figures that a request asks for. timings: with return_usage_details. spec_tokens_details: with
    return_spec_tokens_details."""

    timings: NotRequired[Timings | None]
    spec_tokens_details: NotRequired[SpecTokensDetails]


class Usage(MoreUsage):
    """The tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: NotRequired[CompletionTokensDetails]


class Remarks(TypedDict):
    """Remarks on an answer. warnings: parts of the request without effect. mm_report, timings: with return_mm_report"""

    warnings: NotRequired[list[str]]
    mm_report: NotRequired[MediaReport]
    timings: NotRequired[Timings | None]


# ---- answers


class _Head(TypedDict):
    id: str
    created: int
    model: str


class FunctionOfCall(TypedDict):
    """A called function. arguments: JSON, as the model wrote it."""

    name: str
    arguments: str


class CallOfTool(TypedDict):
    id: str
    type: Literal["function"]
    function: FunctionOfCall


class AnswerMessage(TypedDict):
    """The message of an answer. content: null if the answer has calls only."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallOfTool]]


class ChatChoice(TypedDict):
    """One choice of an answer. stop_reason: the stop string that was found. token_ids: with return_token_ids."""

    index: int
    message: AnswerMessage
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishType
    stop_reason: str | None
    token_ids: NotRequired[list[int]]
    hidden_states: NotRequired[list[list[float]]]


class ChatCompletion(_Head, Remarks):
    """A whole answer."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: NotRequired[PromptLogprobs]
    prompt_token_ids_logprobs: NotRequired[list[list[float] | None]]
    prompt_token_ids: NotRequired[list[int]]


# ---- in chunks


class FunctionDelta(TypedDict):
    name: NotRequired[str]
    arguments: str


class CallDelta(TypedDict):
    """A piece of a call. id, type and the function's name come first, then pieces of its arguments."""

    index: int
    id: NotRequired[str]
    type: NotRequired[Literal["function"]]
    function: FunctionDelta


class ChatDelta(TypedDict):
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[str]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[CallDelta]]


class ChunkChoice(TypedDict):
    index: int
    delta: ChatDelta
    logprobs: ChoiceLogprobs | None
    finish_reason: FinishType | None
    stop_reason: NotRequired[str | None]
    token_ids: NotRequired[list[int]]


class ChatCompletionChunk(_Head, Remarks):
    """A part of a streamed answer; the last one has the usage, if the request asks for it, and the first one of each
    choice the prompt's token ids."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]


# ---- text completions


class LogprobColumns(TypedDict):
    """One entry for each token. text_offset: characters of the choice's text before the token."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(TypedDict):
    """One choice of an answer. stop_reason: the stop string that was found. token_ids, prompt_token_ids: with
    return_token_ids."""

    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | None
    prompt_logprobs: NotRequired[PromptLogprobs]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextCompletion(_Head):
    """The answers to all prompts. warnings: parts of the request without effect."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage
    warnings: NotRequired[list[str]]


class TextChunkChoice(TypedDict):
    index: int
    text: str
    logprobs: LogprobColumns | None
    finish_reason: Literal["stop", "length"] | None
    stop_reason: NotRequired[str | None]
    token_ids: NotRequired[list[int]]
    prompt_token_ids: NotRequired[list[int]]


class TextCompletionChunk(_Head):
    """A part of streamed answers; the last one has the warnings, and the usage if the request asks for it."""

    object: Literal["text_completion"]
    choices: list[TextChunkChoice]
    usage: NotRequired[Usage | None]
    warnings: NotRequired[list[str]]
