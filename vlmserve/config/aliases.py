"""The settings of vLLM, SGLang and llama.cpp, and ours in their place. docs/flags-of-others.md has the table."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
ANY = "*"


@dataclass(frozen=True, kw_only=True)
class Alias:
    """What another engine's setting means here.

    sets: our settings. The first one gets the value, unless `convert` returns our settings and their values.
    switch: the setting has no value on the command line (--x, --no-x). taken: values that change nothing here; ANY
    stands for all. instead: our settings that an error points to. advice: what an error says in place of them.
    """

    sets: tuple[str, ...] = ()
    convert: Callable[[Any], Mapping[str, Any]] | None = None
    switch: bool = False
    taken: tuple[str, ...] = ()
    instead: tuple[str, ...] = ()
    advice: str = ""


def _mapping(value: Any, example: str) -> Mapping[str, Any]:
    """Return a setting that is written as a JSON object, or as image=4,video=1."""
    if isinstance(value, str):
        try:
            value = (
                json.loads(value) if value.lstrip().startswith("{") else dict(p.split("=") for p in value.split(","))
            )
        except ValueError:
            raise SettingsError(f"it must be a JSON object such as '{example}'") from None
    if not isinstance(value, Mapping):
        raise SettingsError(f"it must be a mapping such as {example}")
    return value


def _media_counts(value: Any) -> Mapping[str, Any]:
    kinds = ("image", "video", "audio")
    ours = {kind: f"max_{kind}s_per_request" for kind in kinds}
    found = {}
    for kind, count in _mapping(value, '{"image": 4, "video": 1}').items():
        count = count.get("count") if isinstance(count, Mapping) else count
        if kind in ours and count is not None:
            found[ours[kind]] = count
        elif str(count) != "0":
            what = f"it limits {', '.join(kinds)} (--max-images-per-request, ...)"
            raise SettingsError(f"{what}; there is no {kind!r} here")
    return found


def _processor_knobs(value: Any) -> Mapping[str, Any]:
    ours = {"max_pixels": "max_pixels", "fps": "video_fps", "device": "resize_device"}
    given = _mapping(value, '{"max_pixels": 1003520}')
    for name in given:
        if name not in ours:
            raise SettingsError(f"it sets {', '.join(ours)}; {name!r} belongs into a request's mm_processor_kwargs")
    return {
        ours[name]: "model" if name == "device" and str(value).startswith("cuda") else value
        for name, value in given.items()
    }


def _cache_size(value: Any) -> Mapping[str, Any]:
    try:
        return {"processor_cache_mib": round(float(value) * 1024)}
    except (TypeError, ValueError, OverflowError):
        raise SettingsError("it must be a number of GiB") from None


def _generation_defaults(value: Any) -> Mapping[str, Any]:
    try:
        return {"sampling_defaults": {"auto": "model", "vllm": "openai"}[value]}
    except (KeyError, TypeError):
        raise SettingsError("it must be auto (the checkpoint's generation_config.json) or vllm (OpenAI's)") from None


def _capture_sizes(value: Any) -> Mapping[str, Any]:
    sizes = value.strip("[] ").replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple):
        raise SettingsError("it must be a list such as 1,2,4")
    return {"cuda_graph_bs": ",".join(map(str, sizes))}


def _switch(convert: Callable[[bool], Mapping[str, Any]]) -> Alias:
    return Alias(sets=tuple({**convert(True), **convert(False)}), switch=True, convert=convert)


_RENAMED = {
    "model": "model_path",
    "max_model_len": "context_length",
    "mem_fraction_static": "gpu_memory_utilization",
    "max_running_requests": "max_num_seqs",
    "lora_paths": "lora_modules",
    "max_loras_per_batch": "max_loras",
    "max_loaded_loras": "max_cpu_loras",
    "chunked_prefill_size": "max_num_batched_tokens",
    "page_size": "block_size",
    "tp_size": "tensor_parallel_size tp",
    "ep_size": "expert_parallel_size ep",
    "dp_size": "data_parallel_size dp",
    "pp_size": "pipeline_parallel_size pp",
    "quantization": "q",
    "hicache_size_gib": "hicache_size",
    "random_seed": "seed",
    "role": "disaggregation_mode",
    "cuda_graph_max_bs": "max_cudagraph_capture_size",
    "schedule_policy": "scheduling_policy",
    "watchdog_timeout_s": "watchdog_timeout",
    "log_level": "uvicorn_log_level log_level_http",
    "max_images_per_request": "limit_mm_per_prompt.image",
    "max_videos_per_request": "limit_mm_per_prompt.video",
    "max_audios_per_request": "limit_mm_per_prompt.audio",
}
_CONVERTED = {
    "enable_prefix_caching": _switch(lambda on: {"disable_radix_cache": not on}),
    "enable_chunked_prefill": _switch(lambda on: {} if on else {"chunked_prefill_size": -1}),
    "enforce_eager": _switch(lambda on: {"disable_cuda_graph": on, "disable_vit_cuda_graph": on}),
    "async_scheduling": _switch(lambda on: {"disable_overlap_schedule": not on}),
    "enable_log_requests": _switch(lambda on: {"log_requests": on}),
    "disable_fast_image_processor": _switch(lambda on: {"resize_device": "cpu"} if on else {}),
    "mm_enable_dp_encoder": _switch(lambda on: {"mm_encoder_tp_mode": "data" if on else "one"}),
    "is_embedding": _switch(lambda on: {"task": "embed"} if on else {}),
    "encoder_only": _switch(lambda on: {"role": "encode" if on else "all"}),
    "cudagraph_capture_sizes": Alias(sets=("cuda_graph_bs",), convert=_capture_sizes),
    "limit_mm_per_prompt": Alias(
        sets=("max_images_per_request", "max_videos_per_request", "max_audios_per_request"), convert=_media_counts
    ),
    "mm_processor_kwargs": Alias(sets=("max_pixels", "video_fps", "resize_device"), convert=_processor_knobs),
    "mm_processor_cache_gb": Alias(sets=("processor_cache_mib",), convert=_cache_size),
    "generation_config": Alias(sets=("sampling_defaults",), convert=_generation_defaults),
}
_SWITCHES_WITHOUT_EFFECT = (
    "trust_remote_code disable_log_requests disable_uvicorn_access_log enable_auto_tool_choice enable_metrics "
    "enable_multimodal skip_server_warmup jinja mmap mlock cont_batching cb webui metrics"
)
_VALUES_WITHOUT_EFFECT = {
    "swap_space": ANY,
    "max_logprobs": " ".join(map(str, range(21))),
    "tokenizer_mode model_impl": "auto",
    "stream_interval": "1",
    "mamba_ssm_cache_dtype mamba_ssm_dtype": "float32 auto",
    "base_gpu_id cpu_offload_gb": "0",
    "distributed_executor_backend": "mp uni none",
    "guided_decoding_backend structured_outputs_config grammar_backend": "auto xgrammar",
    "runner": "auto generate pooling",
    "kv_transfer_config": "null",
}
_OFF_ONLY = "enable_dp_lm_head enable_torch_compile disable_cuda_graph_padding"
_INSTEAD = {
    "kv_cache_memory_bytes num_gpu_blocks_override": "max_total_tokens",
    "max_mamba_cache_size mamba_full_memory_ratio mamba_cache_mode": "mamba_cache_mib",
    "mamba_block_size": "mamba_track_interval",
    "prefill_attention_backend decode_attention_backend": "attention_backend",
    "master_addr master_port": "dist_init_addr",
    "media_io_kwargs": "max_video_frames video_fps",
    "all2all_backend": "moe_a2a_backend",
    "eplb_config": "ep_num_redundant_experts eplb_rebalance_num_iterations",
    "compilation_config O": "disable_cuda_graph cuda_graph_bs",
    "speculative_config": "speculative_algorithm speculative_draft_model_path",
    # llama.cpp's
    "m hf hf_repo": "model",
    "a alias": "served_model_name",
    "c ctx_size": "max_model_len",
    "ngl gpu_layers n_gpu_layers mg main_gpu": "device",
    "ts tensor_split sm split_mode": "tp_size",
    "t threads tb threads_batch": "num_threads",
    "np parallel": "max_running_requests",
    "b batch_size ub ubatch_size": "chunked_prefill_size",
    "ctk cache_type_k ctv cache_type_v": "kv_cache_dtype",
    "fa flash_attn": "attention_backend",
}
_ADVICE = {
    "mmproj mm mmproj_url mmu": "leave it out, for MODEL's folder has the vision tower, too",
    "n predict n_predict": "leave it out: requests have max_tokens",
    "temp temperature top_k top_p min_p repeat_penalty": "leave it out: requests have it, and MODEL's "
    "generation_config.json has the defaults",
    "offline": "set the variable HF_HUB_OFFLINE=1",
}
_REFUSED = (
    "download_dir tokenizer tokenizer_path ssl_keyfile ssl_certfile root_path fastapi_root_path "
    "override_generation_config moe_dense_tp_size "
    "pp_max_micro_batch_size mm_encoder_attn_backend mm_attention_backend"
)
_INSTEAD_OF_SWITCHES = {
    "enable_priority_scheduling schedule_low_priority_values_first": "schedule_policy",
    "enable_expert_parallel": "ep_size",
}

ALIASES: Mapping[str, Alias] = {
    **{name: Alias(sets=(ours,)) for ours, names in _RENAMED.items() for name in names.split()},
    **_CONVERTED,
    **{name: Alias(switch=True, taken=(ANY,)) for name in _SWITCHES_WITHOUT_EFFECT.split()},
    **{
        name: Alias(taken=tuple(taken.split()))
        for names, taken in _VALUES_WITHOUT_EFFECT.items()
        for name in names.split()
    },
    **{name: Alias(switch=True, taken=("false",)) for name in _OFF_ONLY.split()},
    **{name: Alias() for name in _REFUSED.split()},
    **{name: Alias(instead=tuple(ours.split())) for names, ours in _INSTEAD.items() for name in names.split()},
    **{name: Alias(advice=advice) for names, advice in _ADVICE.items() for name in names.split()},
    **{
        name: Alias(switch=True, taken=("false",), instead=(ours,))
        for names, ours in _INSTEAD_OF_SWITCHES.items()
        for name in names.split()
    },
}
"""Other engines' names, written as our settings; a name of up to three letters is also taken with a single dash."""

_VALUES: Mapping[str, Mapping[str, str]] = {
    "attention_backend": {
        "triton_attn": "triton",
        **dict.fromkeys(("torch_native", "torch_sdpa", "sdpa"), "torch"),
        # FlashAttention's kernels come with FlashInfer, which auto takes first
        **dict.fromkeys(("flash_attn", "fa2", "fa3", "fa4", "cpu_attn", "null"), "auto"),
    },
    "dtype": {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"},
    # formats of checkpoints, which are seen in config.json
    "quantization": {
        **dict.fromkeys(("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto", "null"), "none"),
        "w8a8_int8": "w8a8",
    },
    "tool_call_parser": {"qwen": "hermes", "qwen25": "hermes", "qwen3_xml": "qwen3_coder"},
    "reasoning_parser": {"qwen3-thinking": "qwen3", "deepseek_r1": "qwen3", "deepseek-r1": "qwen3"},
    "mm_encoder_tp_mode": {"weights": "one"},
    "role": {"null": "all"},
    "task": {"embedding": "embed", "score": "rerank", "classify": "rerank"},
    "log_level": {"warn": "warning", "critical": "error", "trace": "debug"},
}


def our_settings(alias: Alias, value: Any, place: str) -> Mapping[str, Any]:
    """Return our settings and their values for another engine's setting.

    place: where the setting was given, for errors. Raises SettingsError for a value that has no meaning here.
    """
    if alias.switch:
        value = _on_or_off(value, place)
    try:
        if alias.convert is not None:
            return alias.convert(value)
    except SettingsError as error:
        raise SettingsError(f"{place} is {value!r}: {error}") from None
    if alias.sets:
        return {alias.sets[0]: value}
    if ANY in alias.taken or str(value).lower() in alias.taken:
        return {}
    if alias.instead or alias.advice:
        advice = alias.advice or f"use {' or '.join(map(flag, alias.instead))}"
        raise SettingsError(f"{place} is not supported; {advice}")
    if alias.switch or not alias.taken:
        raise SettingsError(f"{place} is not supported")
    raise SettingsError(f"{place} is {value!r}; only {', '.join(alias.taken)} is supported")


def translated(
    given: Mapping[str, Any], known: Collection[str], places: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Return settings by the names here, and the place of each. Unknown names stay as they are.

    places: where each was given, for errors. Raises SettingsError, also if two names set the same.
    """
    found: dict[str, Any] = {name: value for name, value in given.items() if name in known}
    set_by = dict(places)
    for name, value in given.items():
        alias = None if name in known else ALIASES.get(name)
        if name not in known and alias is None and is_alias(name):
            alias, value = ALIASES[name.removeprefix("no_")], not _on_or_off(value, places[name])
        if alias is None:
            found[name] = value
            continue
        for ours, our_value in our_settings(alias, value, places[name]).items():
            if ours in found:
                raise SettingsError(f"{places[name]} and {set_by[ours]} set the same: give one")
            found[ours], set_by[ours] = our_value, places[name]
    return found, set_by


def is_alias(name: str) -> bool:
    """Return whether another engine has a setting of this name, also with no_ before a switch."""
    alias = ALIASES.get(name.removeprefix("no_"))
    return name in ALIASES or (alias is not None and alias.switch)


def usual_word(name: str, value: Any) -> Any:
    """Return a setting's value as the word that we use: half becomes float16, INFO becomes info."""
    if not isinstance(value, str) or name not in _VALUES:
        return value
    return _VALUES[name].get(value.lower(), value.lower())


def _on_or_off(value: Any, place: str) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise SettingsError(f"{place} is {value!r}; it must be true or false")
    return text in _TRUE
