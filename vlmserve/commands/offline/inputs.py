"""What callers of `vlmserve.LLM` may write: settings, typed for editors, conversations and sampling in short forms.

A test compares the settings with `EngineArgs`. A text that is no URL names a local file here, and here only: in the
server all text comes from clients.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeAlias, TypedDict

import numpy as np

from processors.fetch.limits import FetchSettings
from processors.inputs import Modality
from vlmserve.commands.client.media import with_addresses
from vlmserve.config.aliases import translated, usual_word
from vlmserve.config.checks import SettingsError, check_engine_args, type_problems
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve.config.plain_problems import did_you_mean
from vlmserve.frontend.chat_messages import MediaCounts, map_parts
from vlmserve.frontend.pooled import Content
from vlmserve.frontend.sampling import SAMPLING_LISTS
from vlmserve.frontend.stage import StageLimits
from vlmserve.frontend.structured_output import grammar_of
from vlmserve.ipc.messages import GrammarSpec, LogitsProcessorCall, ReturnOptions, SamplingParams
from vlmserve_common.errors import BadRequestError, VlmserveError


class OtherNames(TypedDict, total=False):
    """The names of vLLM and SGLang for settings: docs/flags-of-others.md."""

    context_length: int | None
    disaggregation_mode: Literal["all", "encode", "prefill", "decode"]
    encoder_only: bool
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    lora_modules: str | None
    max_loras: int
    max_cpu_loras: int
    tensor_parallel_size: int
    tp: int
    expert_parallel_size: int
    ep: int
    data_parallel_size: int
    dp: int
    pipeline_parallel_size: int
    pp: int
    q: Literal["none", "int8", "int4", "w8a8"]
    hicache_size: float
    seed: int
    max_cudagraph_capture_size: int | None
    scheduling_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"]
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    enforce_eager: bool
    async_scheduling: bool
    disable_fast_image_processor: bool
    mm_enable_dp_encoder: bool
    is_embedding: bool
    cudagraph_capture_sizes: Sequence[int] | str
    limit_mm_per_prompt: Mapping[str, Any] | str
    mm_processor_kwargs: Mapping[str, Any] | str
    mm_processor_cache_gb: float
    generation_config: Literal["auto", "vllm"]


class EngineSettings(OtherNames, total=False):
    """The fields of `EngineArgs`, and how many pictures and videos a request may have."""

    revision: str | None
    chat_template: str | PathLike[str] | None
    task: Literal["auto", "generate", "embed", "rerank"]
    pooling: Literal["auto", "last", "mean"]
    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "safetensors", "dummy"]
    max_model_len: int | None
    num_threads: int | None
    attention_backend: Literal["auto", "native", "torch", "triton", "flashinfer"]
    cpu_kernels: Literal["auto", "off"]
    gpu_kernels: Literal["auto", "triton", "torch"]
    quantization: Literal["none", "int8", "int4", "w8a8"]
    sampling_defaults: Literal["model", "openai"]
    max_pixels: int | str
    max_pixels_auto_s: float
    low_detail_tokens: int
    max_queued_media: int
    max_mm_workers: int
    media_processes: int
    enable_mm_embeds: bool
    processor_cache_mib: int
    resize_device: Literal["cpu", "model"]
    encoder_dp_size: int
    encoder_devices: str | None
    encoder_threads: int | None
    encoder_timeout_s: float | None
    encoder_max_patches: int | None
    encoder_cache_mib: int | None
    encoder_host_cache_mib: int
    embedding_cache_dir: str | PathLike[str] | None
    embedding_cache_gib: float
    disable_vit_cuda_graph: bool
    encoder_urls: str | None
    encoder_peer_timeout_s: float
    encoder_listen: str
    skip_repeats: bool
    max_video_frames: int
    video_sampling: Literal["transformers", "qwen-vl-utils", "time-grid"]
    video_fps: float | None
    video_frame_cap: bool
    video_reference: Literal["published", "transformers"]
    video_pruning_rate: float
    embedder_url: str | None
    embedder_model: str | None
    embedder_api_key: str | None
    embedder_timeout_s: float
    mem_fraction_static: float
    cpu_kv_cache_gib: float
    max_total_tokens: int | None
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"]
    mamba_cache_mib: int
    mamba_track_interval: int
    page_size: int
    disable_radix_cache: bool
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "priority"]
    enable_hierarchical_cache: bool
    hicache_size_gib: float
    hicache_write_policy: Literal["write_back", "write_through_selective"]
    hicache_storage_dir: str | PathLike[str] | None
    hicache_storage_gib: float
    enable_sleep_mode: bool
    tp_size: int
    pp_size: int
    dp_size: int
    enable_dp_attention: bool
    load_balance_method: Literal["affinity", "round_robin", "shortest_queue"]
    ep_size: int
    moe_a2a_backend: Literal["auto", "none", "torch"]
    enable_eplb: bool
    ep_num_redundant_experts: int
    eplb_rebalance_num_iterations: int
    nnodes: int
    node_rank: int
    dist_init_addr: str | None
    role: Literal["all", "encode", "prefill", "decode"]
    prefill_urls: str | None
    prefill_listen: str
    prefill_peer_timeout_s: float
    kv_transport: Literal["auto", "tcp", "nixl"]
    peer_key: str | None
    mm_encoder_tp_mode: Literal["one", "data"]
    max_running_requests: int
    max_queued_requests: int
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"]
    chunked_prefill_size: int
    enable_mixed_chunk: bool
    max_sessions: int
    session_timeout_s: float
    disable_overlap_schedule: bool
    max_decode_slowdown: float | None
    max_time_between_tokens_s: float | None
    max_step_s: float
    speculative_algorithm: Literal["none", "ngram", "mtp", "eagle3", "draft_model"]
    speculative_draft_model_path: str | None
    speculative_num_draft_tokens: int | str
    max_prefill_tokens: int
    schedule_conservativeness: float
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    cuda_graph_bs: str | None
    enable_lora: bool
    lora_paths: str | None
    merge_lora: bool
    max_loras_per_batch: int
    max_lora_rank: int
    max_loaded_loras: int
    allowed_lora_path: str | PathLike[str] | None
    lora_partial: bool
    logits_processors: str | None
    grammar_timeout_s: float
    grammar_cache_mib: int
    enable_return_hidden_states: bool
    random_seed: int
    log_interval_s: float
    check_pools_when_idle: bool
    max_images_per_request: int
    max_videos_per_request: int
    max_audios_per_request: int


Conversation: TypeAlias = str | Sequence[Mapping[str, Any]]
"""OpenAI's messages, or the text of one message of the user's."""

PooledInput: TypeAlias = str | Mapping[str, Any]
"""A text, or the parts of an input: see `LLM.embed`."""

_URLS = ("image_url", "video_url", "audio_url")
_MEDIA = (*_URLS, "image", "video", "audio", "image_embeds", "video_embeds")
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]*:")
_COUNTS = {
    "max_images_per_request": "images",
    "max_videos_per_request": "videos",
    "max_audios_per_request": "audios",
}
_KEYWORDS = {flag(name): name for name in (*(field.name for field in dataclasses.fields(EngineArgs)), *_COUNTS)}


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
    include_stop_str_in_output: bool | None
    allowed_token_ids: Sequence[int] | None


class ChatOptions(SamplingOptions, total=False):
    """`SamplingOptions`, and what else a request may ask for.

    mm_processor_kwargs: how media are prepared, unless a part says (`processors.families.processor_kwargs`). returns:
    more results besides the answer. logits_processors: the operator's, by name. truncate_prompt_tokens: as in the API.
    lora: the name of a LoRA adapter.
    """

    num_logprobs: int | None
    mm_processor_kwargs: Mapping[str, Any] | None
    returns: ReturnOptions
    logits_processors: Sequence[LogitsProcessorCall]
    lora: str | None
    truncate_prompt_tokens: int | None


@contextlib.contextmanager
def keywords_named() -> Iterator[None]:
    """Let errors name settings by their keywords (page_size), and not by the command line's flags (--page-size)."""
    try:
        yield
    except VlmserveError as error:
        message = re.sub(r"--[a-z0-9-]+", lambda found: _KEYWORDS.get(found[0], found[0]), str(error.args[0]))
        error.args = (message,)
        if isinstance(error, BadRequestError):
            error.message = message
        raise


@keywords_named()
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
    # threads decode media: the files are those of the caller; and nobody reads along
    args = EngineArgs(model=os.fspath(model), **{"media_processes": 0, "max_decode_slowdown": 0.0, **given, **paths})
    check_engine_args(args)
    problems = type_problems(counts, lambda name: f"--max-{name}-per-request")
    if problems:
        raise SettingsError("\n".join(problems))
    return args, StageLimits(fetch=fetch or FetchSettings(), counts=counts)


def conversation(
    chat: Conversation, images: Any = (), videos: Any = (), audios: Any = ()
) -> Sequence[Mapping[str, Any]]:
    """Return messages in OpenAI's form, whose local files are Paths.

    images, videos, audios: one, or several, which go before the text. They are allowed with a text only. Raises
    TypeError, also if `chat` is no conversation.
    """
    parts = [{"type": "image", "image": image} for image in _several(images)]
    parts += [{"type": "video", "video": video} for video in _several(videos)]
    parts += [{"type": "audio", "audio": audio} for audio in _several(audios)]
    if isinstance(chat, str):
        content = [*parts, {"type": "text", "text": chat}] if parts else chat
        return with_addresses([{"role": "user", "content": content}], _path)
    if parts:
        raise TypeError("media go with a text; in a list of messages they stand in the messages' content")
    if not isinstance(chat, list | tuple) or not all(isinstance(message, Mapping) for message in chat):
        what = 'a conversation is a text, or a list of messages such as {"role": "user", "content": "Hello"}'
        raise TypeError(f"{what}; this is {reprlib.repr(chat)}")
    return with_addresses(chat, _path)


def listed(given: Any) -> list[Any]:
    """Return inputs as a list: one input is not in a list."""
    return list(given) if isinstance(given, list | tuple) else [given]


def pooled_content(given: PooledInput) -> Content:
    """Return an input as a text or as parts, whose local files are Paths. Raises TypeError for anything else."""
    if isinstance(given, Mapping) and given.keys() == {"content"}:
        content = given["content"]
    elif isinstance(given, Mapping) and given and given.keys() <= {"text", "image", "video"}:
        content = [{"type": kind, kind: value} for kind, value in given.items()]
    elif isinstance(given, str):
        content = given
    else:
        what = "an input is a text, or a mapping with text, image and video, or with content"
        raise TypeError(f"{what}; this is {reprlib.repr(given)}")
    [message] = with_addresses([{"role": "user", "content": content}], _path)
    return message["content"]


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    """Check messages as the server does, but for media that are objects here. Raises BadRequestError."""
    plain = [
        {**one, "tool_calls": [_plain_call(call) for call in one["tool_calls"]]} if one.get("tool_calls") else {**one}
        for one in map_parts(messages, _plain_part)
    ]
    try:
        from vlmserve.frontend.openai.json_bodies import checked
        from vlmserve.frontend.openai.protocol import WarmupRequest
    except ModuleNotFoundError:  # there is no pydantic beside an engine without a server
        return
    checked({"messages": plain}, WarmupRequest)


def _plain_part(part: Any, _place: str) -> Any:
    """Return a part as a client would send it: an address stands for a medium, whose type is checked later."""
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind not in _MEDIA or part.get(kind) is None or (kind in _URLS and isinstance(part[kind], Mapping)):
        return part
    return {**part, kind: "address"}


def _plain_call(call: Any) -> Any:
    """Return a call as a client would send it. Here it may lack what no template prints; arguments may be a dict."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call
    given = function.get("arguments")
    arguments = json.dumps(given, default=str) if isinstance(given, Mapping) else given
    return {"id": "", "type": "function", **call, "function": {**function, "arguments": arguments}}


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
    for name in SAMPLING_LISTS:
        if given.get(name) is not None:
            given[name] = tuple(given[name])
    whole = dataclasses.replace(sampling or SamplingParams(), **given)
    problems = type_problems(whole, lambda name: "max_tokens" if name == "max_new_tokens" else name)
    if problems:
        raise TypeError("\n".join(problems))
    return whole


def _several(media: Any) -> Iterable[Any]:
    return media if isinstance(media, Iterable) and not isinstance(media, str | bytes | np.ndarray) else [media]


def _path(address: str, _modality: Modality) -> str | Path:
    return address if not address.strip() or _URL.match(address) else Path(address).expanduser()
