"""The short forms of settings, conversations and sampling that callers of `vlmserve.LLM` may write.

A text that is no URL names a local file here, and here only: in the server all text comes from clients.
"""

from __future__ import annotations

import dataclasses
import os
import re
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias, TypedDict

import numpy as np

from processors.fetch.limits import FetchSettings
from vlmserve.config.aliases import translated, usual_word
from vlmserve.config.checks import SettingsError, check_engine_args, type_problems
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.plain_problems import did_you_mean
from vlmserve.frontend.chat_messages import MediaCounts, map_parts
from vlmserve.frontend.stage import StageLimits
from vlmserve.frontend.structured_output import grammar_of
from vlmserve.ipc.messages import GrammarSpec, LogitsProcessorCall, ReturnOptions, SamplingParams

Conversation: TypeAlias = str | Sequence[Mapping[str, Any]]
"""OpenAI's messages, or the text of one message of the user's."""

_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_COUNTS = {"max_images_per_request": "images", "max_videos_per_request": "videos"}


class SamplingOptions(TypedDict, total=False):
    """`SamplingParams` as keywords; max_tokens is max_new_tokens.

    response_format and structured_outputs (one of json, regex, choice, grammar, structural_tag, json_object) are the
    API's, in place of a grammar.
    """

    max_tokens: int | None
    max_new_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    seed: int | None
    stop: str | Sequence[str] | None
    stop_token_ids: Sequence[int] | None
    ignore_eos: bool | None
    presence_penalty: float | None
    frequency_penalty: float | None
    repetition_penalty: float | None
    logit_bias: dict[int, float] | None
    skip_special_tokens: bool | None
    grammar: GrammarSpec | None
    response_format: Mapping[str, Any] | None
    structured_outputs: Mapping[str, Any] | None
    min_tokens: int | None


class ChatOptions(SamplingOptions, total=False):
    """`SamplingOptions`, and what else a request may ask for.

    mm_processor_kwargs: how media are prepared, unless a part says (`processors.families.processor_kwargs`). returns:
    more results besides the answer. logits_processors: the operator's, by name.
    """

    num_logprobs: int | None
    mm_processor_kwargs: Mapping[str, Any] | None
    returns: ReturnOptions
    logits_processors: Sequence[LogitsProcessorCall]


def read_settings(
    model: str | os.PathLike[str], fetch: FetchSettings | None, settings: Mapping[str, Any]
) -> tuple[EngineArgs, StageLimits]:
    """Return checked settings and limits from keywords (`EngineSettings`). fetch: what media URLs may reach.

    Raises SettingsError for an unknown setting or a wrong value.
    """
    fields = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    given, _ = translated(settings, fields, {name: name for name in settings})
    counts = MediaCounts(**{short: given.pop(name) for name, short in _COUNTS.items() if name in given})
    for name in given:
        if name not in fields:
            raise SettingsError(f"LLM has no setting {name!r}{did_you_mean(name, fields)}")
    given = {name: usual_word(name, value) for name, value in given.items()}
    paths = {name: os.fspath(value) for name, value in given.items() if isinstance(value, os.PathLike)}
    # threads decode media: the files are those of the caller
    args = EngineArgs(model=os.fspath(model), **{"media_processes": 0, **given, **paths})
    check_engine_args(args)
    problems = type_problems(counts, lambda name: f"--max-{name}-per-request")
    if problems:
        raise SettingsError("\n".join(problems))
    return args, StageLimits(fetch=fetch or FetchSettings(), counts=counts)


def conversation(chat: Conversation, images: Any = (), videos: Any = ()) -> Sequence[Mapping[str, Any]]:
    """Return messages in OpenAI's form, whose local files are Paths.

    images, videos: one, or several, which go before the text. They are allowed with a text only. Raises TypeError, also
    if `chat` is no conversation.
    """
    parts = [{"type": "image", "image": image} for image in _several(images)]
    parts += [{"type": "video", "video": video} for video in _several(videos)]
    if isinstance(chat, str):
        content = [*parts, {"type": "text", "text": chat}] if parts else chat
        return map_parts([{"role": "user", "content": content}], _part)
    if parts:
        raise TypeError("images and videos go with a text; in a list of messages they stand in the messages' content")
    if not isinstance(chat, list | tuple) or not all(isinstance(message, Mapping) for message in chat):
        what = 'a conversation is a text, or a list of messages such as {"role": "user", "content": "Hello"}'
        raise TypeError(f"{what}; this is {reprlib.repr(chat)}")
    return map_parts(chat, _part)


def sampling_of(sampling: SamplingParams | None, options: Mapping[str, Any]) -> SamplingParams:
    """Return both together; an option wins. Raises TypeError for an unknown option, or a value of another type."""
    given = dict(options)
    for name in given:
        if name not in SamplingOptions.__annotations__:
            raise TypeError(f"there is no option {name!r}{did_you_mean(name, SamplingOptions.__annotations__)}")
    if "max_tokens" in given:
        given["max_new_tokens"] = given.pop("max_tokens")
    forms = {name: given.pop(name, None) for name in ("response_format", "structured_outputs")}
    if any(form is not None for form in forms.values()):
        if given.get("grammar") is not None:
            raise TypeError("grammar, response_format and structured_outputs all say what answers look like: give one")
        given["grammar"] = grammar_of(forms)
    if isinstance(given.get("stop"), str):
        given["stop"] = (given["stop"],)
    for name in ("stop", "stop_token_ids"):
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    whole = dataclasses.replace(sampling or SamplingParams(), **given)
    problems = type_problems(whole, lambda name: "max_tokens" if name == "max_new_tokens" else name)
    if problems:
        raise TypeError("\n".join(problems))
    return whole


def _several(media: Any) -> Iterable[Any]:
    return media if isinstance(media, Iterable) and not isinstance(media, str | bytes | np.ndarray) else [media]


def _part(part: Any, _place: str) -> Any:
    """Convert the paths of a part. A part of an unexpected shape stays as it is, for the check of messages."""
    if not isinstance(part, Mapping):
        return part
    kind = part.get("type")
    if kind in ("image", "video") and kind in part:
        return {**part, kind: _path(part[kind])}
    if kind in ("image_url", "video_url"):
        return _url_part(part, kind)
    return part


def _url_part(part: Mapping[str, Any], kind: str) -> Mapping[str, Any]:
    """Return a part of the kind that takes paths, if its URL is a path."""
    value = part.get(kind)
    url = value.get("url") if isinstance(value, Mapping) else value
    path = _path(url)
    if not isinstance(path, Path):
        return part
    plain = kind.removesuffix("_url")
    rest = {name: other for name, other in part.items() if name not in ("type", kind)}
    beside = {name: other for name, other in value.items() if name != "url"} if isinstance(value, Mapping) else {}
    return {"type": plain, plain: path, **rest, **beside}


def _path(value: Any) -> Any:
    """Return a Path for a text that is no URL; for a list of frames likewise."""
    if isinstance(value, list | tuple):
        return [_path(frame) for frame in value]
    if isinstance(value, str) and value.strip() and not _URL.match(value):
        return Path(value).expanduser()
    return value
