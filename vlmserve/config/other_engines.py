"""What vLLM and SGLang call their settings, and what becomes of each here: data, which `config.aliases` applies.

docs/flags-of-others.md is made from it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from vlmserve.config.checks import SettingsError

Convert = Callable[[Any], Mapping[str, Any]]
ANY = "*"


@dataclass(frozen=True, kw_only=True)
class ForeignSetting:
    """vllm, sglang: its names there, written as our settings (with underscores); a name of one letter or two is also
    taken with a single dash. switch: it has no value (--x, --no-x).

    sets: our settings that it sets; the first to its value, unless `convert` says which to what. negated: to the
    contrary. fine: values that change nothing here (ANY: all), and are taken. answer: what is said of it, and of the
    values that are refused.
    """

    vllm: tuple[str, ...] = ()
    sglang: tuple[str, ...] = ()
    switch: bool = False
    sets: tuple[str, ...] = ()
    convert: Convert | None = None
    negated: bool = False
    fine: tuple[str, ...] = ()
    answer: str = ""

    @property
    def names(self) -> tuple[str, ...]:
        """All of them, each once."""
        return tuple(dict.fromkeys(self.vllm + self.sglang))


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _same(ours: str, vllm: str = "", sglang: str = "", answer: str = "", **more: Any) -> ForeignSetting:
    return ForeignSetting(vllm=_words(vllm), sglang=_words(sglang), sets=_words(ours), answer=answer, **more)


def _answered(
    answer: str, vllm: str = "", sglang: str = "", fine: str = "", *, both: str = "", **more: Any
) -> ForeignSetting:
    """both: names that are the same in either."""
    vllm_names, sglang_names = _words(f"{both} {vllm}"), _words(f"{both} {sglang}")
    return ForeignSetting(vllm=vllm_names, sglang=sglang_names, answer=answer, fine=_words(fine), **more)


def _mapping(value: Any, example: str) -> Mapping[str, Any]:
    """A setting that is a JSON object, or image=4,video=1."""
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
    ours = {"image": "max_images_per_request", "video": "max_videos_per_request"}
    found = {}
    for kind, count in _mapping(value, '{"image": 4, "video": 1}').items():
        count = count.get("count") if isinstance(count, Mapping) else count
        if kind in ours and count is not None:
            found[ours[kind]] = count
        elif str(count) != "0":
            raise SettingsError(f"it limits image and video (--max-images-per-request, ...); there is no {kind!r} here")
    return found


def _processor_knobs(value: Any) -> Mapping[str, Any]:
    ours = {"max_pixels": "max_pixels", "fps": "video_fps", "device": "resize_device"}
    given = _mapping(value, '{"max_pixels": 1003520}')
    for name in given:
        if name not in ours:
            raise SettingsError(
                "for all requests there are max_pixels (--max-pixels), fps (--video-fps) and device (--resize-device); "
                f"{name!r} belongs into a request's mm_processor_kwargs"
            )
    return {ours[name]: _resize_device(value) if name == "device" else value for name, value in given.items()}


def _resize_device(value: Any) -> str:
    return "model" if str(value).startswith("cuda") else str(value)


def _slow_processor(off: bool) -> Mapping[str, Any]:
    return {"resize_device": "cpu"} if off else {}


def _encoders_mode(on: bool) -> Mapping[str, Any]:
    return {"mm_encoder_tp_mode": "data" if on else "one"}


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


def _whole_prompts(value: Any) -> Mapping[str, Any]:
    return {} if value else {"chunked_prefill_size": -1}


def _no_graphs(value: Any) -> Mapping[str, Any]:
    return {"disable_cuda_graph": value, "disable_vit_cuda_graph": value}


def _capture_sizes(value: Any) -> Mapping[str, Any]:
    sizes = value.strip("[] ").replace(",", " ").split() if isinstance(value, str) else value
    if not isinstance(sizes, list | tuple):
        raise SettingsError("it must be a list such as 1,2,4")
    return {"cuda_graph_bs": ",".join(map(str, sizes))}


def _twenty_at_the_most(value: Any) -> Mapping[str, Any]:
    if str(value).isdecimal() and int(value) <= 20:
        return {}
    raise SettingsError("a request may ask for 20 at the most")


_ONE_GPU = "several GPUs share one model's layers (--tp-size, --pp-size), and nothing else yet"
_NOT_COMPILED = "models are not compiled here; for CUDA graphs there are --cuda-graph-bs and --disable-cuda-graph"
_ENCODERS = "--encoder-dp-size and --encoder-devices spread the vision encoder"
_PROXY = "a reverse proxy in front of the server does that"

FOREIGN: tuple[ForeignSetting, ...] = (
    # the same by another name
    _same("model", sglang="model_path"),
    _same("max_model_len", sglang="context_length"),
    _same("mem_fraction_static", vllm="gpu_memory_utilization", answer="without what computing takes beside them"),
    _same("max_running_requests", vllm="max_num_seqs"),
    _same("chunked_prefill_size", vllm="max_num_batched_tokens", answer="of prompts; decoding comes on top"),
    _same("page_size", vllm="block_size"),
    _same("tp_size", vllm="tensor_parallel_size tp", sglang="tensor_parallel_size tp"),
    _same("ep_size", sglang="expert_parallel_size ep"),
    _same("dp_size", vllm="data_parallel_size dp", sglang="data_parallel_size dp"),
    _same("pp_size", vllm="pipeline_parallel_size pp", sglang="pipeline_parallel_size pp"),
    _same("quantization", vllm="q"),
    _same("hicache_size_gib", sglang="hicache_size"),
    _same("disable_radix_cache", vllm="enable_prefix_caching", switch=True, negated=True),
    _same("chunked_prefill_size", vllm="enable_chunked_prefill", switch=True, convert=_whole_prompts, answer="off: -1"),
    _same("random_seed", vllm="seed"),
    _same("disable_cuda_graph disable_vit_cuda_graph", vllm="enforce_eager", switch=True, convert=_no_graphs),
    _same("cuda_graph_bs", vllm="cudagraph_capture_sizes", convert=_capture_sizes, answer="with commas between them"),
    _same("cuda_graph_max_bs", vllm="max_cudagraph_capture_size"),
    _same("disable_overlap_schedule", vllm="async_scheduling", switch=True, negated=True),
    _same("schedule_policy", vllm="scheduling_policy"),
    _same("watchdog_timeout_s", sglang="watchdog_timeout"),
    _same("log_requests", vllm="enable_log_requests", switch=True, answer="without their contents"),
    _same("log_level", vllm="uvicorn_log_level", sglang="log_level_http"),
    _same("max_images_per_request max_videos_per_request", vllm="limit_mm_per_prompt", convert=_media_counts),
    _same("max_images_per_request", vllm="limit_mm_per_prompt.image"),
    _same("max_videos_per_request", vllm="limit_mm_per_prompt.video"),
    _same("max_pixels video_fps resize_device", vllm="mm_processor_kwargs", convert=_processor_knobs),
    _same("resize_device", sglang="disable_fast_image_processor", switch=True, convert=_slow_processor, answer="cpu"),
    _same("processor_cache_mib", vllm="mm_processor_cache_gb", convert=_cache_size, answer="in MiB"),
    _same(
        "sampling_defaults", vllm="generation_config", convert=_generation_defaults, answer="auto: model; vllm: openai"
    ),
    # what is so anyway
    _answered(
        "requests are logged with --access-log and --log-requests only",
        "disable_log_requests disable_uvicorn_access_log",
        fine=ANY,
        switch=True,
    ),
    _answered("no code of a checkpoint is ever run", both="trust_remote_code", fine=ANY, switch=True),
    _answered("requests with tools always may have calls", "enable_auto_tool_choice", switch=True, fine=ANY),
    _answered("GET /metrics is always there", sglang="enable_metrics", fine=ANY, switch=True),
    _answered("that is what is served", sglang="enable_multimodal", fine=ANY, switch=True),
    _answered("a few small steps at the start, on GPUs only", sglang="skip_server_warmup", fine=ANY, switch=True),
    _answered("requests that lose their KV cache are computed again", "swap_space", fine=ANY),
    _answered("the checkpoint's fast tokenizer is used", both="tokenizer_mode", fine="auto"),
    _answered("every token is sent as it comes", both="stream_interval", fine="1"),
    _answered("models are our own, see the README for the families", both="model_impl", fine="auto"),
    _answered("a request may ask for 20 at the most", "max_logprobs", convert=_twenty_at_the_most),
    # said in another way here
    _answered(
        "--max-total-tokens says how many tokens it holds, --cpu-kv-cache-gib how large it may get on a CPU",
        "kv_cache_memory_bytes",
    ),
    _answered("--max-total-tokens says it in tokens: blocks times --page-size", "num_gpu_blocks_override"),
    _answered(
        "--schedule-policy priority takes requests by their priority, lower first",
        sglang="enable_priority_scheduling schedule_low_priority_values_first",
        switch=True,
        fine="false",
    ),
    _answered(
        "--mamba-cache-mib says how much memory kept states take, beside those of running requests",
        "mamba_cache_mode",
        "max_mamba_cache_size mamba_full_memory_ratio",
    ),
    _answered("--mamba-track-interval says after how many tokens a state is kept", "mamba_block_size"),
    _answered("recurrent states are float32", "mamba_ssm_cache_dtype", "mamba_ssm_dtype", fine="float32 auto"),
    _answered("--device cuda:N names the GPU", sglang="base_gpu_id", fine="0"),
    _answered(
        "one backend does both: --attention-backend", sglang="prefill_attention_backend decode_attention_backend"
    ),
    _same("mm_encoder_tp_mode", sglang="mm_enable_dp_encoder", switch=True, convert=_encoders_mode),
    _answered("--dist-init-addr HOST:PORT is both", "master_addr master_port"),
    _answered("--max-video-frames and --video-fps say which frames are used", "media_io_kwargs"),
    _answered("name a folder: hf download MODEL --revision REVISION prints it", both="revision"),
    _answered("the variable HF_HOME says where checkpoints are kept", both="download_dir"),
    _answered("the checkpoint's own tokenizer is used", "tokenizer", "tokenizer_path"),
    _answered(_PROXY, "ssl_keyfile ssl_certfile root_path", "ssl_keyfile ssl_certfile fastapi_root_path"),
    _answered("requests that decode take turns in as many groups as --pp-size", sglang="pp_max_micro_batch_size"),
    # not there yet
    _answered(_ONE_GPU, "distributed_executor_backend", fine="mp uni none"),
    _answered(
        "with --enable-dp-attention all ranks share the head", sglang="enable_dp_lm_head", switch=True, fine="false"
    ),
    _answered("with --enable-dp-attention all ranks share dense MLPs", sglang="moe_dense_tp_size"),
    _answered("--ep-size as large as --tp-size does that", "enable_expert_parallel", switch=True, fine="false"),
    _answered("--moe-a2a-backend says how rows get to experts", "all2all_backend"),
    _answered("--ep-num-redundant-experts and --eplb-rebalance-num-iterations say it", "eplb_config"),
    _answered("weights stay on one device; offloading is not supported yet", both="cpu_offload_gb", fine="0"),
    _answered(_NOT_COMPILED, "compilation_config O"),
    _answered(_NOT_COMPILED, sglang="enable_torch_compile", switch=True, fine="false"),
    _answered(
        "a step is always computed as the next larger one",
        sglang="disable_cuda_graph_padding",
        switch=True,
        fine="false",
    ),
    _answered(
        "vision attention is chosen by itself: on a GPU our kernel, if it passes its trial",
        "mm_encoder_attn_backend",
        "mm_attention_backend",
    ),
    _answered(
        "no draft models so far; for guesses without one: --speculative-algorithm ngram",
        "speculative_config",
        "speculative_draft_model_path",
    ),
    _answered("LoRA adapters are not supported yet", both="enable_lora", switch=True, fine="false"),
    _answered(
        "LoRA adapters are not supported yet", "lora_modules max_loras max_lora_rank", "lora_paths max_loras_per_batch"
    ),
    _answered(
        "structured output is always there, by xgrammar",
        "guided_decoding_backend structured_outputs_config",
        "grammar_backend",
        fine="auto xgrammar",
    ),
    _answered("the checkpoint's own template is used; another is not supported yet", both="chat_template"),
    _answered("requests say it themselves; defaults for all are not supported yet", "override_generation_config"),
    _answered("embeddings are not supported yet", "task runner", fine="auto generate"),
    _answered("embeddings are not supported yet", sglang="is_embedding", switch=True, fine="false"),
    _answered(
        "prefill and decoding in servers of their own are not supported yet",
        "kv_transfer_config",
        "disaggregation_mode",
        fine="null",
    ),
)
"""One thing a row, in the order of the documentation."""

VALUES: Mapping[str, Mapping[str, str]] = {
    "attention_backend": {
        "triton_attn": "triton",
        **dict.fromkeys(("torch_native", "torch_sdpa", "sdpa"), "torch"),
        # FlashAttention's kernels come with FlashInfer, which auto takes first
        **dict.fromkeys(("flash_attn", "fa2", "fa3", "fa4", "cpu_attn", "null"), "auto"),
    },
    "dtype": {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "float": "float32", "fp32": "float32"},
    # formats of checkpoints, which are seen in config.json
    "quantization": dict.fromkeys(
        ("awq", "awq_marlin", "gptq", "gptq_marlin", "compressed-tensors", "auto", "null"), "none"
    ),
    "tool_call_parser": {"qwen": "hermes", "qwen25": "hermes", "qwen3_xml": "qwen3_coder"},
    "reasoning_parser": {"qwen3-thinking": "qwen3", "deepseek_r1": "qwen3", "deepseek-r1": "qwen3"},
    "mm_encoder_tp_mode": {"weights": "one"},
    "log_level": {"warn": "warning", "critical": "error", "trace": "debug"},
}
"""Of settings that are called the same: their words for values -> ours. Capitals do not matter."""

BY_NAME: Mapping[str, ForeignSetting] = {name: setting for setting in FOREIGN for name in setting.names}
