"""The shapes of requests and answers of /v1/sessions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError
from typing_extensions import TypedDict

from vlmserve.api.answer_types import ChatCompletion
from vlmserve.config.fields import MOST_SECONDS
from vlmserve.frontend.openai.protocol import ChatOptions, Messages, RawContent, RawTools, StrictModel


class LiveOptions(StrictModel):
    """How the frames of a session become live video. fps: frames a second that are used; those beyond are left out.
    keep_seconds, max_tokens: of live video in the conversation; old frames leave. window: "exact" computes what stays
    as a prompt without what has left; "sliding" keeps its KV, so answers are near that."""

    fps: Annotated[float | None, Field(gt=0, le=60)] = None
    keep_seconds: Annotated[float | None, Field(gt=0, le=1e7)] = None
    max_tokens: Annotated[int | None, Field(ge=1)] = None
    window: Literal["exact", "sliding"] | None = None


class SessionRequest(StrictModel):
    """POST /v1/sessions. system: the text of a system message. ttl: seconds after its last use that the session is
    kept. live: of the frames of a camera. The other fields are those of chat completions, for all that is appended and
    asked."""

    model: str | None = None
    lora_path: str | None = None
    system: Annotated[str | None, Field(min_length=1)] = None
    ttl: Annotated[float | None, Field(gt=0, le=MOST_SECONDS)] = None
    live: LiveOptions | None = None
    tools: RawTools | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=256)] = None


class AppendRequest(StrictModel):
    """POST /v1/sessions/ID/append. content: more of what the user says and shows. messages: whole messages, each of its
    own. mm_processor_kwargs: how the media of this request are prepared, in place of the session's."""

    content: RawContent | None = None
    messages: Messages | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> AppendRequest:
        if (self.content is None) == (self.messages is None):
            raise PydanticCustomError("append_what", "needs either content or messages")
        return self


class AskRequest(ChatOptions):
    """POST /v1/sessions/ID/ask: the fields of chat completions, with a question in place of messages. content: the
    question, behind what the user said and showed. keep: whether question and answer stay in the conversation."""

    content: RawContent | None = None
    keep: bool | None = None


class LiveState(TypedDict):
    """Live video of a session. received: frames that came. used: those that the rate left over. done: those of them
    that are in the conversation, or were given up after an error. tokens: of the prompt when frames joined it last.
    time: of the last frame, in seconds since the first one. pulled: the server pulls it. error: why it no longer
    does."""

    received: int
    used: int
    done: int
    tokens: int
    time: float | None
    pulled: NotRequired[bool]
    error: NotRequired[str]


class SessionObject(TypedDict):
    """A session. created, expires: Unix time in seconds. idle_s: seconds since its last use. tokens: of the prompt as
    it was last computed, with the answer behind it. bytes: memory of texts and processed media."""

    id: str
    object: Literal["session"]
    model: str
    created: int
    expires: int
    age_s: float
    idle_s: float
    ttl: float
    messages: int
    media: int
    tokens: int
    bytes: int
    live: NotRequired[LiveState]


class StandingRequest(AskRequest):
    """POST /v1/sessions/ID/standing: a question that is asked every so often, when frames have come since. every: the
    seconds from one time to the next. max_answers: after so many it ends."""

    every: Annotated[float, Field(ge=0.1, le=MOST_SECONDS)]
    max_answers: Annotated[int | None, Field(ge=1)] = None


class PullRequest(StrictModel):
    """POST /v1/sessions/ID/pull. url: of live video, rtsp:// or http://, on a host that the operator allows."""

    url: Annotated[str, Field(min_length=1, max_length=4096)]


class StandingAnswer(TypedDict):
    """An answer to a standing question. time: of the last frame that it saw, in seconds since the first one."""

    object: Literal["session.answer"]
    number: int
    time: float | None
    answer: ChatCompletion


class AppendUsage(TypedDict):
    """prompt_tokens: of the whole conversation. cached_tokens: those of them that were not computed again."""

    prompt_tokens: int
    cached_tokens: int


class AppendedSession(TypedDict):
    """What came of appending."""

    session: SessionObject
    usage: AppendUsage


class SessionList(TypedDict):
    object: Literal["list"]
    data: list[SessionObject]


class DeletedSession(TypedDict):
    id: str
    object: Literal["session"]
    deleted: bool
