"""OpenAI chat messages to what a chat template takes, and the media they bring, in prompt order."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from PIL import Image

from processors.families.processor_kwargs import RequestKnobs
from processors.fetch.fetching import MediaFile
from processors.inputs import Modality
from processors.knobs import ImageKnobs, laid_over
from processors.processed import ProcessedAudio, ProcessedImage, ProcessedMedium, ProcessedVideo
from processors.video.options import Focus, VideoKnobs
from vlmserve_common.errors import BadRequestError

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool")
# Fields of Qwen's video parts -> `VideoKnobs`; sample_fps is the rate of frames that come as a list.
_VIDEO_FIELDS = {
    "fps": "fps",
    "sample_fps": "fps",
    "nframes": "num_frames",
    "min_frames": "min_frames",
    "max_frames": "max_frames",
    "min_pixels": "min_pixels",
    "max_pixels": "max_pixels",
    "total_pixels": "total_pixels",
    "resized_height": "resized_height",
    "resized_width": "resized_width",
    "video_start": "video_start",
    "video_end": "video_end",
    "skip_repeats": "skip_repeats",
    "video_pruning_rate": "video_pruning_rate",
    "sampling": "sampling",
    "h264_frames": "h264_frames",  # of live video; the API does not take it in messages
}
_IMAGE_FIELDS = ("min_pixels", "max_pixels", "resized_height", "resized_width", "skip_repeats")
# type of a part -> its fields, the same as in the API: the offline LLM refuses misspelt ones, too
_KNOWN_FIELDS = {
    "text": ("text",),
    "refusal": ("refusal",),
    "image_url": ("image_url", *_IMAGE_FIELDS),
    "image": ("image", "detail", *_IMAGE_FIELDS),
    "image_embeds": ("image_embeds",),
    "video_embeds": ("video_embeds",),
    "video_url": ("video_url", *_VIDEO_FIELDS),
    "video": ("video", *_VIDEO_FIELDS),
    "audio_url": ("audio_url",),
    "input_audio": ("input_audio",),
    "audio": ("audio",),
}
_AUDIO = ("audio_url", "input_audio", "audio")
_EMBEDS = {"image_embeds": Modality.IMAGE, "video_embeds": Modality.VIDEO}
_MOST_QUESTION = 2000  # characters that frames are compared with: a longer text's last ones
MEDIA_PARTS = frozenset((*(kind for kind in _KNOWN_FIELDS if kind not in ("text", "refusal")), "file"))
"""The types of parts that bring a medium."""
_PASSED_ON = ("name", "tool_call_id", "reasoning_content", "reasoning")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageRef:
    """A picture named in a message. source: a URL, an uploaded file, a processed picture that a session holds, or
    (offline) bytes, a Path or a Pillow picture.

    param: its place in the request, e.g. "messages[0].content[1]", for errors. knobs: the size that the part asks for;
    detail: OpenAI's word for the size. defaults: the size that the request asks for all pictures.
    """

    source: Any
    param: str
    detail: str | None = None
    knobs: ImageKnobs = field(default_factory=ImageKnobs)
    defaults: ImageKnobs = field(default_factory=ImageKnobs)


@dataclass(frozen=True, kw_only=True, slots=True)
class VideoRef:
    """A video named in a message. source: a tuple of frames (each as in `ImageRef`), a URL, an uploaded file, a
    processed video that a session holds, or (offline) bytes or a Path.

    knobs: frames and sizes that the part asks for. defaults: those that the request asks for all videos. question: the
    text of its message, or of the next one of the user's that has any.
    """

    source: Any
    param: str
    knobs: VideoKnobs = field(default_factory=VideoKnobs)
    defaults: VideoKnobs = field(default_factory=VideoKnobs)
    question: str = field(default="", compare=False)

    @property
    def asked(self) -> VideoKnobs:
        """All knobs. Those of one that is sampled by its question have it."""
        knobs = laid_over(self.knobs, self.defaults)
        if knobs.sampling != "question":
            return knobs
        return replace(knobs, focus=Focus(question=self.question[-_MOST_QUESTION:]))


@dataclass(frozen=True, kw_only=True, slots=True)
class AudioRef:
    """A sound named in a message. source: a URL, an uploaded file, a processed sound that a session holds, or (offline)
    bytes or a Path; of a video it is the sound track."""

    source: Any
    param: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsRef:
    """A medium that comes encoded. source: a URL, an uploaded file, or (offline) bytes, a Path or tensors by name."""

    source: Any
    param: str
    modality: Modality = Modality.IMAGE


MediaRef: TypeAlias = ImageRef | VideoRef | AudioRef | EmbedsRef


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaCounts:
    """The most pictures, videos and sounds that a request may have."""

    images: int = 64
    videos: int = 8
    audios: int = 16


def to_template_messages(
    messages: Sequence[Message], *, reserved: Collection[str] = ()
) -> tuple[list[dict[str, Any]], list[MediaRef]]:
    """Convert OpenAI messages (plain dicts) to what templates take: "developer" is "system", a picture is
    {"type": "image"}, a video {"type": "video"}, a sound {"type": "audio"}. The n-th media placeholder that a template
    writes stands for the n-th of the media returned.

    reserved: texts of placeholder tokens; written out in a message they would ask for a picture that is not there.
    Raises BadRequestError naming the message or part.
    """
    if not messages:
        raise BadRequestError("messages must not be empty", param="messages")
    converted: list[dict[str, Any]] = []
    media: list[MediaRef] = []
    starts: list[int] = []
    for index, message in enumerate(messages):
        starts.append(len(media))
        converted.append(_convert_message(message, f"messages[{index}]", media, reserved))
    if any(isinstance(ref, VideoRef) for ref in media):
        _add_questions(media, starts, converted)
    return converted, media


def _add_questions(media: list[MediaRef], starts: Sequence[int], messages: Sequence[Mapping[str, Any]]) -> None:
    """Tell videos what is asked about them. starts: where the media of each message begin."""
    question, end = "", len(media)
    for message, start in zip(reversed(messages), reversed(starts), strict=True):
        question = _text_of(message) or question
        for at in range(start, end):
            if isinstance(ref := media[at], VideoRef):
                media[at] = replace(ref, question=question)
        end = start


def _text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a converted message of the user's."""
    content = message["content"] if message["role"] == "user" else ""
    if not isinstance(content, str):
        content = " ".join(part["text"] for part in content if part["type"] == "text")
    return content.strip()


def joined_texts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Join the parts of each message, which are all text: templates of models that read text only know no parts."""
    return [
        {**message, "content": "".join(part["text"] for part in message["content"])}
        if isinstance(message["content"], list)
        else dict(message)
        for message in messages
    ]


def settle_media(media: Sequence[MediaRef], knobs: RequestKnobs | None, most: MediaCounts) -> list[MediaRef]:
    """Give media the knobs that the request has for all of them. Raises BadRequestError if there are too many. Those
    that a session holds do not count: they came with earlier requests."""
    new = [medium for medium in media if not isinstance(medium.source, ProcessedMedium)]
    videos = sum(
        isinstance(medium, VideoRef) or (isinstance(medium, EmbedsRef) and medium.modality is Modality.VIDEO)
        for medium in new
    )
    sounds = sum(isinstance(medium, AudioRef) for medium in new)
    for what, name, count, limit in (
        ("image", "picture", len(new) - videos - sounds, most.images),
        ("video", "video", videos, most.videos),
        ("audio", "sound", sounds, most.audios),
    ):
        if count > limit:
            setting = f"--max-{what}s-per-request"
            raise BadRequestError(
                f"the request has {count} {name}s, the limit is {limit} (setting {setting})", param="messages"
            )
    return list(media) if knobs is None else [_with_defaults(ref, knobs) for ref in media]


def _with_defaults(ref: MediaRef, knobs: RequestKnobs) -> MediaRef:
    if isinstance(ref, ImageRef):
        return replace(ref, defaults=knobs.image)
    if isinstance(ref, VideoRef):
        return replace(ref, defaults=knobs.video)
    return ref


def _convert_message(message: Message, param: str, media: list[MediaRef], reserved: Collection[str]) -> dict[str, Any]:
    role = message.get("role")
    if role not in ROLES:
        raise BadRequestError(f"{param}.role is {role!r}; it must be one of {', '.join(ROLES)}", param=f"{param}.role")
    content = message.get("content")
    if content is None:
        # Templates go through the content of every message; None would stop them.
        content = ""
    elif isinstance(content, str):
        _check_text(content, f"{param}.content", reserved)
    elif isinstance(content, Sequence):
        content = [
            _convert_part(part, f"{param}.content[{i}]", role, media, reserved) for i, part in enumerate(content)
        ]
    else:
        raise BadRequestError(
            f"{param}.content is of type {type(content).__name__}; it must be text or a list of parts",
            param=f"{param}.content",
        )
    result: dict[str, Any] = {"role": "system" if role == "developer" else role, "content": content}
    result |= {key: message[key] for key in _PASSED_ON if message.get(key) is not None}
    if "reasoning" in result:  # the newer name; templates look for the older one
        result.setdefault("reasoning_content", result["reasoning"])
    if message.get("tool_calls"):
        result["tool_calls"] = [_convert_tool_call(call) for call in message["tool_calls"]]
    return result


def _convert_part(part: Any, param: str, role: str, media: list[MediaRef], reserved: Collection[str]) -> dict[str, Any]:
    if not isinstance(part, Mapping):
        raise BadRequestError(
            f"{param} is of type {type(part).__name__}; it must be an object with a type", param=param
        )
    kind = part.get("type")
    if kind in _KNOWN_FIELDS:
        _check_fields(part, ("type", *_KNOWN_FIELDS[kind]), param)
    if kind in ("text", "refusal"):
        text = part.get(kind)
        if not isinstance(text, str):
            raise BadRequestError(f"{param}.{kind} is missing or not text", param=f"{param}.{kind}")
        _check_text(text, f"{param}.{kind}", reserved)
        return {"type": "text", "text": text}
    if kind in _KNOWN_FIELDS:
        video = kind in ("video_url", "video", "video_embeds")
        if role != "user":
            what = "sounds" if kind in _AUDIO else "videos" if video else "pictures"
            raise BadRequestError(f"{param}: {what} belong into user messages, this one is of {role!r}", param=param)
        if kind in _AUDIO:
            media.append(_audio_ref(part, kind, param))
            return {"type": "audio"}
        make = _embeds_ref if kind in _EMBEDS else _video_ref if video else _image_ref
        media.append(make(part, kind, param))
        return {"type": "video" if video else "image"}
    allowed = (
        "text, image_url, image, video_url, video, audio_url, input_audio, audio, file, image_embeds or video_embeds"
    )
    raise _invalid(f"{param}.type", f"is {kind!r}; it must be {allowed}")


def _image_ref(part: Mapping[str, Any], kind: str, param: str) -> ImageRef:
    value, detail = part.get(kind), part.get("detail")
    if kind == "image_url":
        detail = value.get("detail") if isinstance(value, Mapping) else None
        value = _url(value, ("url", "detail"), f"{param}.image_url", "image")
    else:
        value = _picture_source(value, f"{param}.image")
    knobs = ImageKnobs(**{name: part.get(name) for name in _IMAGE_FIELDS})
    return ImageRef(source=value, param=param, detail=detail, knobs=knobs)


def _embeds_ref(part: Mapping[str, Any], kind: str, param: str) -> EmbedsRef:
    """Text is the base64 of a safetensors file; so is `data`, in the place of a `url`."""
    value: Any = part.get(kind)
    if isinstance(value, str):
        value = {"data": value}
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
        value = "data:application/octet-stream;base64," + value["data"]
    elif isinstance(value, Mapping) and isinstance(value.get("url"), str):
        value = value["url"]
    if not isinstance(value, str | bytes | Path | MediaFile | Mapping):
        allowed = "a safetensors file: base64, or without a server bytes, a Path or tensors by name"
        raise _invalid(f"{param}.{kind}", f"is of type {type(value).__name__}; it must be {allowed}")
    return EmbedsRef(source=value, param=param, modality=_EMBEDS[kind])


def _video_ref(part: Mapping[str, Any], kind: str, param: str) -> VideoRef:
    url = kind == "video_url"
    place, value = f"{param}.{kind}", part.get(kind)
    value = _url(value, ("url",), place, "video") if url else _video_source(value, place)
    if part.get("fps") is not None and part.get("sample_fps") is not None:
        raise BadRequestError(f"{param}: fps and sample_fps exclude each other", param=param, code="invalid_value")
    knobs = {knob: part[name] for name, knob in _VIDEO_FIELDS.items() if part.get(name) is not None}
    return VideoRef(source=value, param=param, knobs=VideoKnobs(**knobs))


def _audio_ref(part: Mapping[str, Any], kind: str, param: str) -> AudioRef:
    """The bytes of a sound tell its format, not the name that `input_audio` gives it."""
    place, value = f"{param}.{kind}", part.get(kind)
    if kind == "audio_url":
        return AudioRef(source=_url(value, ("url",), place, "audio"), param=param)
    if kind == "input_audio":
        if not isinstance(value, Mapping) or not isinstance(value.get("data"), str):
            raise _invalid(f"{place}.data", "is missing or not text; it must be the base64 of a sound file")
        _check_fields(value, ("data", "format"), place)
        data = value["data"]
        return AudioRef(source=data if data.startswith("data:") else f"data:audio/any;base64,{data}", param=param)
    if not isinstance(value, (*_FILES, ProcessedAudio)):
        raise _refused(value, "a URL, or without a server bytes or a Path", place)
    return AudioRef(source=value, param=param)


def _url(value: Any, known: Collection[str], param: str, kind: str) -> str:
    """Return the URL of image_url, video_url or audio_url, whose value may be the URL itself. kind: the part that takes
    other things."""
    if isinstance(value, Mapping):
        _check_fields(value, known, param)
        value = value.get("url")
    if value is None:
        raise BadRequestError(f"{param} has no url", param=param)
    if not isinstance(value, str):
        what = f"is of type {type(value).__name__}, not a URL; other things belong into a part of type {kind!r}"
        raise _invalid(param, what)
    return value


def _check_fields(given: Mapping[str, Any], known: Collection[str], param: str) -> None:
    for name, value in given.items():
        if name not in known and value is not None:  # a table fills in the fields of other parts with nulls
            raise _invalid(f"{param}.{name}", f"is not a known field; known are {', '.join(known)}")


def _convert_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    """OpenAI carries arguments as JSON text; templates want the object (and get the text if it is none)."""
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = json.loads(function["arguments"] or "{}")
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "function": function}


def _check_text(text: str, param: str, reserved: Collection[str]) -> None:
    for word in reserved:
        if word in text:
            raise BadRequestError(
                f"{param} contains {word!r}, which stands for media in the prompt; send the media as a part of its own",
                param=param,
            )


def _invalid(param: str, what: str) -> BadRequestError:
    return BadRequestError(f"{param} {what}", param=param, code="invalid_value")


def map_parts(messages: Sequence[Mapping[str, Any]], change: Callable[[Any, str], Any]) -> list[Mapping[str, Any]]:
    """Replace each part of the messages by `change(part, place)`, with a place such as "messages[0].content[1]". A
    message whose content is no list stays as it is."""

    def changed(message: Mapping[str, Any], place: str) -> Mapping[str, Any]:
        parts = message.get("content")
        if not isinstance(parts, list | tuple):
            return message
        return {**message, "content": [change(part, f"{place}.content[{i}]") for i, part in enumerate(parts)]}

    return [changed(message, f"messages[{i}]") for i, message in enumerate(messages)]


FindFile: TypeAlias = Callable[[str], MediaFile]
"""A file's id -> the file. Raises BadRequestError (404)."""

# type of a part -> of the one that brings the medium
_URL_PARTS = {"image_url": "image", "video_url": "video", "audio_url": "audio", **{kind: kind for kind in _EMBEDS}}


def with_files(messages: Sequence[Mapping[str, Any]], find: FindFile | None) -> list[Mapping[str, Any]]:
    """Put files in the place of their ids: {"type": "image", "image": MediaFile} or the same with "video".

    An id stands in {"type": "file", "file": {"file_id": ...}}, in the place of a URL, or in the place of a video's
    frame, {"type": "video", "video": [{"file_id": ...}]}. In the first form the file's bytes tell its kind.
    find: None where there are no uploaded files. Raises BadRequestError naming the part.
    """
    return map_parts(messages, lambda part, place: _with_file(part, place, find))


def _with_file(part: Any, param: str, find: FindFile | None) -> Any:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind == "file":
        place, given = f"{param}.file", part.get("file")
        if not isinstance(given, Mapping) or given.get("file_id") is None:
            raise BadRequestError(
                f"{place} has no file_id; only files uploaded to /v1/files are supported here, data: URLs in image_url "
                "and video_url parts",
                param=place,
                code="unsupported_content",
            )
        file = _find(given["file_id"], place, find)
        modality = file.modality
        if modality is None:
            raise BadRequestError(
                f"{place}: the file {given['file_id']} is neither a picture nor a video nor a sound of a supported "
                "format",
                param=f"{place}.file_id",
                code="unsupported_content",
            )
        return {"type": modality.value, modality.value: file}
    if kind in _URL_PARTS and isinstance(given := part.get(kind), Mapping) and given.get("file_id") is not None:
        name = _URL_PARTS[kind]
        others = {key: value for key, value in part.items() if key != kind}
        rest = {key: value for key, value in given.items() if key not in ("file_id", "url")}
        return {**others, **rest, "type": name, name: _find(given["file_id"], f"{param}.{kind}", find)}
    if kind == "video" and isinstance(frames := part.get("video"), list | tuple):
        frames = [
            _find(one["file_id"], f"{param}.video[{place}]", find)
            if isinstance(one, Mapping) and one.get("file_id") is not None
            else one
            for place, one in enumerate(frames)
        ]
        return {**part, "video": frames}
    return part


def _find(file_id: Any, param: str, find: FindFile | None) -> MediaFile:
    param = f"{param}.file_id"
    if find is None:
        raise BadRequestError(f"{param}: there are no uploaded files without a server", param=param)
    try:
        return find(file_id)
    except BadRequestError as error:
        error.param = param
        raise


_FILES = (str, bytes, Path, MediaFile)
_PICTURE = "a URL, or without a server bytes, a Path, a Pillow picture or a numpy array uint8 [height, width, 3]"
_VIDEO = (
    "a URL or a list of frames, or without a server bytes, a Path or a numpy array uint8 [frames, height, width, 3]; "
    f"a frame is {_PICTURE}"
)


def _picture_source(value: Any, param: str) -> Any:
    if isinstance(value, np.ndarray) and _is_pixels(value, 3):
        return Image.fromarray(value)
    if isinstance(value, (*_FILES, Image.Image, ProcessedImage)):
        return value
    raise _refused(value, _PICTURE, param)


def _video_source(value: Any, param: str) -> Any:
    """Return a video as the processor pool takes it; a list of frames becomes a tuple."""
    if isinstance(value, np.ndarray) and _is_pixels(value, 4):
        return tuple(map(Image.fromarray, value))
    if isinstance(value, list | tuple):
        return tuple(_picture_source(frame, f"{param}[{place}]") for place, frame in enumerate(value))
    if isinstance(value, (*_FILES, ProcessedVideo)):
        return value
    raise _refused(value, _VIDEO, param)


def _is_pixels(array: np.ndarray, dimensions: int) -> bool:
    return array.dtype == np.uint8 and array.ndim == dimensions and array.shape[-1] == 3 and 0 not in array.shape[-3:]


def _refused(value: Any, allowed: str, param: str) -> BadRequestError:
    what = "missing" if value is None else f"of type {type(value).__name__}"
    if isinstance(value, np.ndarray):
        what = f"a numpy array {value.dtype} {list(value.shape)}"
    return _invalid(param, f"is {what}; it must be {allowed}")
