"""POST /v1/audio/transcriptions: OpenAI's form, answered by a model that hears and writes."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Literal, NotRequired

from fastapi import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import receive_body
from vlmserve.api.callers import caller_of
from vlmserve.api.chat import chat_events, whole_chat
from vlmserve.api.errors import Error
from vlmserve.api.files import UploadForm
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import DONE, EventStream, ServedModel, parsed_events, while_connected
from vlmserve.frontend.openai.json_bodies import invalid_value, sse_event
from vlmserve.frontend.openai.protocol import ChatCompletionRequest, StreamOptions
from vlmserve_common.errors import BadRequestError

_FORM: dict[str, Any] = {
    "type": "object",
    "required": ["file"],
    "additionalProperties": False,
    "properties": {
        "file": {"type": "string", "contentMediaType": "application/octet-stream"},
        "model": {"type": "string"},
        "language": {"type": "string"},
        "prompt": {"type": "string"},
        "response_format": {"type": "string", "enum": ["json", "text"]},
        "temperature": {"type": "number", "minimum": 0, "maximum": 2},
        "stream": {"type": "string", "enum": ["true", "false"]},
    },
}
_FIELDS = tuple(name for name in _FORM["properties"] if name != "file")
_FED = 2**20  # bytes of a form that are read at a time
# ISO 639-1 codes of the languages that Qwen2.5-Omni and Qwen3-Omni were trained to hear; others go as they are written
_LANGUAGES = {
    "ar": "Arabic",
    "de": "German",
    "en": "English",
    "es": "Spanish",
    "fr": "French",
    "id": "Indonesian",
    "it": "Italian",
    "ja": "Japanese",
    "ko": "Korean",
    "ms": "Malay",
    "nl": "Dutch",
    "pt": "Portuguese",
    "ru": "Russian",
    "th": "Thai",
    "tr": "Turkish",
    "ur": "Urdu",
    "vi": "Vietnamese",
    "yue": "Cantonese",
    "zh": "Chinese",
}


class TranscriptionUsage(TypedDict):
    """The tokens of a transcription."""

    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int


class Transcription(TypedDict):
    text: str
    usage: TranscriptionUsage


class TranscriptEvent(TypedDict):
    """An event of a stream: more of the text, or at its end all of it."""

    type: Literal["transcript.text.delta", "transcript.text.done"]
    delta: NotRequired[str]
    text: NotRequired[str]
    usage: NotRequired[TranscriptionUsage]


@operation(
    *("POST", "/v1/audio/transcriptions", "createTranscription", "Answers"),
    form=_FORM,
    answer=Transcription,
    events=TranscriptEvent | Error,
    ends_with_done=True,
    errors=MODEL_ERRORS,
)
async def transcribe(served: ServedModel, request: Request) -> Response:
    """Write down what is said in a sound, or in the sound track of a clip."""
    body, kind = await receive_body(request, served.settings), request.headers.get("content-type", "")
    fields, sound = await request.app.state.parsing.run(_fields, kind, body)
    del body
    served.check_name(fields.get("model"))
    limit = served.settings.max_audio_bytes
    if len(sound) > limit:
        what = f"the sound has {len(sound)} bytes; the limit is {limit} (setting --max-audio-bytes)"
        raise BadRequestError(what, param="file", code="file_too_large")
    own_id = name_answer(request, "transcr")
    chat = _chat(fields, sound)
    try:
        if chat.stream:
            events = _events(chat_events(served, chat, own_id, caller_of(request)))
            return await EventStream.begin(request.receive, events)
        answer = await while_connected(request.receive, whole_chat(served, chat, own_id, caller_of(request)))
    except BadRequestError as error:
        place = "messages[0].content[0]"  # of the chat that this is
        if (error.param or "").startswith(place):
            message = error.message.replace(f"{place}: ", "")
            raise BadRequestError(message, param="file", code=error.code, status=error.status) from None
        raise
    text = answer["choices"][0]["message"]["content"] or ""
    if fields.get("response_format") == "text":
        return PlainTextResponse(text + "\n")
    return JSONResponse({"text": text, "usage": _usage(answer["usage"])})


def _fields(content_type: str, body: bytearray) -> tuple[dict[str, str], bytes]:
    """Return the form's fields and the file's bytes. Raises BadRequestError."""
    sound = bytearray()
    form = UploadForm(content_type, _FIELDS, sound.extend)
    for start in range(0, len(body), _FED):  # no second copy of all of it
        form.feed(bytes(body[start : start + _FED]))
    form.finish()
    fields = {name: value.lower() if name == "stream" else value for name, value in form.fields.items()}
    for name, allowed in (("response_format", ("json", "text")), ("stream", ("true", "false"))):
        if fields.get(name, allowed[0]) not in allowed:
            raise invalid_value(name, f"{name} is {fields[name][:80]!r}; it must be {' or '.join(allowed)}")
    if fields.get("stream") == "true" and fields.get("response_format") == "text":
        raise invalid_value("response_format", "response_format is 'text'; with stream it must be json")
    return fields, bytes(sound)


def _chat(fields: dict[str, str], sound: bytes) -> ChatCompletionRequest:
    """Return the chat request for a transcription. The model's recipe has the language in the question."""
    language = fields.get("language", "")
    of = f"the {_LANGUAGES.get(language.lower(), language)} audio" if language else "the audio"
    question = f"Transcribe {of} into text."
    if fields.get("prompt"):
        question += f" Its context: {fields['prompt']}"
    content = [{"type": "audio", "audio": sound}, {"type": "text", "text": question}]
    stream = fields.get("stream") == "true"
    return ChatCompletionRequest.model_construct(
        model=fields.get("model"),
        messages=[{"role": "user", "content": content}],
        temperature=_temperature(fields.get("temperature", "0")),
        stream=stream,
        stream_options=StreamOptions(include_usage=True) if stream else None,
    )


def _temperature(given: str) -> float:
    try:
        value = float(given)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise invalid_value("temperature", f"temperature is {given[:80]!r}; it must be a number from 0 to 2")
    return value


async def _events(chunks: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """Yield a transcription's events for those of a chat."""
    text, usage = "", None
    async with aclosing(chunks):
        async for some in chunks:
            out = b""
            for chunk in parsed_events(some):
                if "error" in chunk:
                    yield out + sse_event(chunk) + DONE
                    return
                usage = chunk.get("usage") or usage
                more = "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
                if more:
                    text += more
                    out += sse_event({"type": "transcript.text.delta", "delta": more})
            yield out
    done = {"type": "transcript.text.done", "text": text}
    yield sse_event(done if usage is None else done | {"usage": _usage(usage)}) + DONE


def _usage(usage: dict[str, Any]) -> TranscriptionUsage:
    return {
        "type": "tokens",
        "input_tokens": usage["prompt_tokens"],
        "output_tokens": usage["completion_tokens"],
        "total_tokens": usage["total_tokens"],
    }
