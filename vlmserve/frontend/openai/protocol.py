"""The shapes of OpenAI's chat completion requests. Unknown fields and wrong types are refused.

`convert` decides if a field is supported, `vlmserve.frontend` if its value makes sense for the model. Messages and
tools are validated here but kept as the client wrote them (plain dicts, keys in their order): templates print them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, LiteralString, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetCoreSchemaHandler,
    Tag,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from vlmserve.config.fields import MOST_SECONDS


def _end_lists_early(schema: Any) -> None:
    if isinstance(schema, dict):
        if schema.get("type") == "list":
            schema["fail_fast"] = True
        schema = list(schema.values())
    if isinstance(schema, list | tuple):
        for inner in schema:
            _end_lists_early(inner)


class StrictModel(BaseModel):
    """A model without unknown fields and without conversions between types.

    Only the first problem of a list, and the first unknown field, are looked for: pydantic would describe each of a
    million at once, which holds the interpreter for seconds.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, protected_namespaces=())

    @classmethod
    def __get_pydantic_core_schema__(cls, source: type[BaseModel], handler: GetCoreSchemaHandler) -> CoreSchema:
        """Let every list of the model end at its first problem."""
        schema = handler(source)
        _end_lists_early(schema)
        return schema

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, value: Any) -> Any:
        """Leave out all unknown fields but the first."""
        if not isinstance(value, dict) or len(value) <= len(cls.__pydantic_fields__):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next((name for name in value if name not in known), None)
        return {name: one for name, one in value.items() if name in known or name == unknown}


class OneOfKinds(StrictModel):
    """One of several kinds in a list. The fields of other kinds may be there as null: tables fill them in."""

    @model_validator(mode="before")
    @classmethod
    def _no_nulls_of_others(cls, value: Any) -> Any:
        if not isinstance(value, dict) or None not in value.values():
            return value
        return {name: one for name, one in value.items() if one is not None or name in cls.__pydantic_fields__}


def _first_wrong(*kinds: type) -> BeforeValidator:
    """Return a validator of an object: it leaves nothing but the first value of another type, if there is one, for the
    reason that `StrictModel` has."""

    def leave(value: Any) -> Any:
        if isinstance(value, dict):
            for name, one in value.items():
                if type(one) not in kinds:
                    return {name: one}
        return value

    return BeforeValidator(leave)


LogitBias = Annotated[dict[str, float], _first_wrong(float, int)]
Metadata = Annotated[dict[str, str], _first_wrong(str)]


def _keep_raw(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
    handler(value)
    return value


def by_type(must_be: LiteralString, **types: type | tuple[type, ...]) -> Discriminator:
    """Return the choice among the members of a union by a value's type. types: tag of a member -> its types."""

    def tag_of(value: Any) -> str | None:
        return next((tag for tag, kinds in types.items() if isinstance(value, kinds)), None)

    return Discriminator(tag_of, custom_error_type="wrong_type", custom_error_message=must_be)


def _text_as(name: str, must_be: LiteralString) -> Callable[[Any], Any]:
    """Return a validator that takes text for an object with the text in this field."""

    def convert(value: Any) -> Any:
        if not isinstance(value, str | dict):
            raise PydanticCustomError("wrong_type", must_be)
        return {name: value} if isinstance(value, str) else value

    return convert


_url_object = _text_as("url", "must be a URL, or an object with a url")


def _list_of_one(value: Any) -> Any:
    if not isinstance(value, str | list | None):
        raise PydanticCustomError("list_or_text", "must be text or a list")
    return [value] if isinstance(value, str) else value


_CONTENT = by_type("must be text or a list of parts", text=str, parts=list)


# ---- parts of a message


class TextPart(OneOfKinds):
    type: Literal["text"]
    text: str


class RefusalPart(OneOfKinds):
    type: Literal["refusal"]
    refusal: str


class MediaSource(StrictModel):
    """A URL, or the id of an uploaded file in its place."""

    url: str | None = None
    file_id: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.url is None) == (self.file_id is None):
            raise PydanticCustomError("media_source", "needs either a url or a file_id")
        return self


class ImageUrl(MediaSource):
    detail: Literal["auto", "low", "high"] | None = None


class ImageFields(OneOfKinds):
    """The fields of Qwen's own code beside a picture, and ours; see `processors.knobs.ImageKnobs`."""

    min_pixels: int | None = None
    max_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    skip_repeats: bool | None = None


class ImageUrlPart(ImageFields):
    """image_url may also be the URL itself."""

    type: Literal["image_url"]
    image_url: Annotated[ImageUrl, BeforeValidator(_url_object, json_schema_input_type=str | ImageUrl)]


class ImagePart(ImageFields):
    """Qwen's own form."""

    type: Literal["image"]
    image: str
    detail: Literal["auto", "low", "high"] | None = None


class Embeds(StrictModel):
    """A safetensors file: a URL, base64, or the id of an uploaded one; see `processors.embeds`."""

    url: str | None = None
    data: str | None = None
    file_id: str | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if [self.url, self.data, self.file_id].count(None) != 2:
            raise PydanticCustomError("embeds_source", "needs one of url, data and file_id")
        return self


_data_object = _text_as("data", "must be base64 text, or an object with a url, data or a file_id")


class ImageEmbedsPart(OneOfKinds):
    """image_embeds may also be the base64 text itself."""

    type: Literal["image_embeds"]
    image_embeds: Annotated[Embeds, BeforeValidator(_data_object, json_schema_input_type=str | Embeds)]


class VideoEmbedsPart(OneOfKinds):
    """video_embeds may also be the base64 text itself."""

    type: Literal["video_embeds"]
    video_embeds: Annotated[Embeds, BeforeValidator(_data_object, json_schema_input_type=str | Embeds)]


class VideoFields(OneOfKinds):
    """The fields of Qwen's own code beside a video, and ours; see `processors.video.options.VideoKnobs`."""

    fps: float | None = None
    sample_fps: float | None = None
    nframes: int | None = None
    min_frames: int | None = None
    max_frames: int | None = None
    min_pixels: int | None = None
    max_pixels: int | None = None
    total_pixels: int | None = None
    resized_height: int | None = None
    resized_width: int | None = None
    video_start: float | None = None
    video_end: float | None = None
    skip_repeats: bool | None = None
    video_pruning_rate: float | None = None
    sampling: Literal["adaptive", "question"] | None = None


class VideoUrlPart(VideoFields):
    type: Literal["video_url"]
    video_url: Annotated[MediaSource, BeforeValidator(_url_object, json_schema_input_type=str | MediaSource)]


class FrameFile(StrictModel):
    """The id of an uploaded picture."""

    file_id: str


Frame = Annotated[
    Annotated[str, Tag("url")] | Annotated[FrameFile, Tag("file")],
    by_type("must be a URL, or an object with a file_id", url=str, file=(dict, FrameFile)),
]


class VideoPart(VideoFields):
    """Qwen's own form: a URL, or the URLs of frames, some of which may be uploaded files."""

    type: Literal["video"]
    video: Annotated[list[Frame], BeforeValidator(_list_of_one, json_schema_input_type=str | list[Frame])]


class InputAudio(StrictModel):
    """A sound as base64 text. Its bytes tell the format."""

    data: str
    format: str | None = None


class InputAudioPart(OneOfKinds):
    type: Literal["input_audio"]
    input_audio: InputAudio


class AudioUrlPart(OneOfKinds):
    """audio_url may also be the URL itself."""

    type: Literal["audio_url"]
    audio_url: Annotated[MediaSource, BeforeValidator(_url_object, json_schema_input_type=str | MediaSource)]


class AudioPart(OneOfKinds):
    """Qwen's own form."""

    type: Literal["audio"]
    audio: str


class File(StrictModel):
    file_data: str | None = None
    file_id: str | None = None
    filename: str | None = None


class FilePart(OneOfKinds):
    type: Literal["file"]
    file: File


AnyPart = Annotated[
    TextPart
    | ImageUrlPart
    | ImagePart
    | ImageEmbedsPart
    | VideoUrlPart
    | VideoPart
    | VideoEmbedsPart
    | AudioUrlPart
    | InputAudioPart
    | AudioPart
    | FilePart,
    Field(discriminator="type"),
]
RawParts = Annotated[list[Annotated[AnyPart, WrapValidator(_keep_raw)]], Field(min_length=1)]
AssistantPart = Annotated[TextPart | RefusalPart, Field(discriminator="type")]
TextParts = Annotated[list[TextPart], Field(min_length=1)]
UserContent = Annotated[
    Annotated[str, Tag("text")] | Annotated[list[AnyPart], Field(min_length=1), Tag("parts")], _CONTENT
]
TextContent = Annotated[Annotated[str, Tag("text")] | Annotated[TextParts, Tag("parts")], _CONTENT]
AssistantContent = Annotated[Annotated[str, Tag("text")] | Annotated[list[AssistantPart], Tag("parts")], _CONTENT]


# ---- messages


class CalledFunction(StrictModel):
    name: str
    arguments: str


class ToolCall(StrictModel):
    id: str
    type: Literal["function"]
    function: CalledFunction
    index: int | None = None


class SystemMessage(OneOfKinds):
    role: Literal["system", "developer"]
    content: TextContent
    name: str | None = None


class UserMessage(OneOfKinds):
    role: Literal["user"]
    content: UserContent
    name: str | None = None


class AssistantMessage(OneOfKinds):
    """The message of an answer that is sent back, its empty fields included."""

    role: Literal["assistant"]
    content: AssistantContent | None = None
    tool_calls: list[Annotated[ToolCall, WrapValidator(_keep_raw)]] | None = None
    name: str | None = None
    refusal: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    annotations: list[Any] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _says_something(self) -> AssistantMessage:
        if self.content is None and not self.tool_calls and self.refusal is None:
            raise PydanticCustomError("empty_message", "needs content or tool_calls, as a message of the assistant")
        return self


class ToolMessage(OneOfKinds):
    role: Literal["tool"]
    content: TextContent
    tool_call_id: str
    name: str | None = None


Message = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]


# ---- options


class Function(StrictModel):
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(StrictModel):
    type: Literal["function"]
    function: Function


class FunctionName(StrictModel):
    name: str


class NamedToolChoice(StrictModel):
    type: Literal["function"]
    function: FunctionName


class StreamOptions(StrictModel):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class JsonSchema(StrictModel):
    """A JSON schema of an answer. The field `schema` has another name here, since `BaseModel` has taken its own."""

    name: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(StrictModel):
    """The form of an answer. format; structures, triggers: of a structural tag, in xgrammar's newer and older form."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    format: dict[str, Any] | None = None
    structures: list[dict[str, Any]] | None = None
    triggers: list[str] | None = None


class StructuredOutputs(StrictModel):
    """vLLM's field for the form of an answer: one of these."""

    json_: Annotated[str | dict[str, Any] | bool | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | dict[str, Any] | None = None
    json_object: bool | None = None


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("word")] | Annotated[NamedToolChoice, Tag("named")],
    by_type("must be none, auto, required or a named function", word=str, named=dict),
]


Messages = Annotated[list[Annotated[Message, WrapValidator(_keep_raw)]], Field(min_length=1)]


class WarmupRequest(StrictModel):
    """POST /v1/warmup: the fields of a chat completion request about media. pin: never evict their embeddings."""

    messages: Messages
    mm_processor_kwargs: dict[str, Any] | None = None
    model: str | None = None
    pin: bool | None = None


Stop = Annotated[list[str] | None, BeforeValidator(_list_of_one, json_schema_input_type=str | list[str] | None)]


class LogitsProcessorName(StrictModel):
    """A logits processor. params: values for the processor."""

    name: str
    params: dict[str, Any] | None = None


_named_object = _text_as("name", "must be a name, or an object with a name")
LogitsProcessor = Annotated[
    LogitsProcessorName, BeforeValidator(_named_object, json_schema_input_type=str | LogitsProcessorName)
]


TokenIds = Annotated[list[int], Field(min_length=1)]
IdsOrMessages = Annotated[
    Annotated[TokenIds, Tag("ids")] | Annotated[Messages, Tag("messages")],
    Discriminator(lambda value: "messages" if value and isinstance(value[0], dict) else "ids"),
]
Query = Annotated[
    Annotated[str, Tag("text")] | Annotated[IdsOrMessages, Tag("list")],
    by_type("must be text, token ids or a conversation", text=str, list=list),
]
Item = Annotated[
    Annotated[str, Tag("text")] | Annotated[TokenIds, Tag("ids")],
    by_type("must be text or token ids", text=str, ids=list),
]
Items = Annotated[list[Item] | None, BeforeValidator(_list_of_one, json_schema_input_type=str | list[Item] | None)]


class NamedRequest(StrictModel):
    """Fields of all requests that are computed: their name, scheduling and caching."""

    rid: Annotated[str | None, Field(pattern=r"^[!-~]{1,128}$")] = None
    timeout: Annotated[float | None, Field(gt=0, le=MOST_SECONDS)] = None
    cache_salt: Annotated[str | None, Field(min_length=1, max_length=256)] = None
    priority: Annotated[int | None, Field(ge=-(2**31), lt=2**31)] = None
    data_parallel_rank: Annotated[int | None, Field(ge=0)] = None
    lora_path: str | None = None


class FormedRequest(NamedRequest):
    """Fields about the form of answers: OpenAI's, then vLLM's and SGLang's. A request may have one of them (see
    `frontend.structured_output`)."""

    response_format: Annotated[ResponseFormat | None, WrapValidator(_keep_raw)] = None
    structured_outputs: Annotated[StructuredOutputs | None, WrapValidator(_keep_raw)] = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None


class SampledRequest(FormedRequest):
    """Fields that chat and text completions have alike: OpenAI's, then the extensions of vLLM and SGLang."""

    frequency_penalty: float | None = None
    logit_bias: LogitBias | None = None
    max_tokens: int | None = None
    n: int | None = None
    presence_penalty: float | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**63)] = None
    stop: Stop = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    allowed_token_ids: list[int] | None = None
    truncate_prompt_tokens: int | None = None
    return_token_ids: bool | None = None
    return_spec_tokens_details: bool | None = None
    prompt_logprobs: int | None = None
    logits_processors: list[LogitsProcessor] | None = None


class ScoreRequest(NamedRequest):
    """POST /v1/score: SGLang's fields, then ours. A query may be a conversation with media."""

    model: str | None = None
    query: Query
    items: Items = None
    label_token_ids: TokenIds | None = None
    apply_softmax: bool = False
    item_first: bool = False

    labels: Annotated[list[str] | None, Field(min_length=1)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None


class ChatOptions(SampledRequest):
    """What a chat may say besides its messages: OpenAI's fields, then the extensions of vLLM and SGLang."""

    model: str | None = None

    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: list[Annotated[Tool, WrapValidator(_keep_raw)]] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    modalities: list[Literal["text", "audio"]] | None = None

    # accepted, without an effect on the answer
    metadata: Metadata | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
    store: bool | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    # official, not supported (see convert.py)
    audio: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None
    web_search_options: dict[str, Any] | None = None
    functions: list[Any] | None = None
    function_call: str | dict[str, Any] | None = None

    # extensions
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None
    return_mm_report: bool | None = None
    return_usage_details: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    logprob_start_len: int | None = None
    token_ids_logprob: list[int] | None = None
    temp_scaled_logprobs: bool | None = None
    top_p_normalized_logprobs: bool | None = None
    return_hidden_states: bool | Literal["last", "all"] | None = None


class ChatCompletionRequest(ChatOptions):
    """POST /v1/chat/completions."""

    messages: Messages
    session_id: Annotated[str | None, Field(min_length=1, max_length=256)] = None


RawContent = Annotated[UserContent, WrapValidator(_keep_raw)]
RawTools = list[Annotated[Tool, WrapValidator(_keep_raw)]]
FIELDS_INSIDE = frozenset(
    name
    for model in StrictModel.__subclasses__()
    for cls in (model, *model.__subclasses__())
    if not issubclass(cls, NamedRequest | WarmupRequest)
    for name in cls.model_fields
)
"""The fields of all that a request is made of, for guesses at misspelt ones."""
