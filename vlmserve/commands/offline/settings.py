"""The keywords of `LLM` and `AsyncLLM`, typed for editors. A test compares them with `EngineArgs`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any, Literal, TypedDict


class OtherNames(TypedDict, total=False):
    """The names of vLLM and SGLang for settings: docs/flags-of-others.md."""

    context_length: int | None
    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    tensor_parallel_size: int
    tp: int
    expert_parallel_size: int
    ep: int
    data_parallel_size: int
    dp: int
    pipeline_parallel_size: int
    pp: int
    q: Literal["none", "int8", "int4"]
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
    cudagraph_capture_sizes: Sequence[int] | str
    limit_mm_per_prompt: Mapping[str, Any] | str
    mm_processor_kwargs: Mapping[str, Any] | str
    mm_processor_cache_gb: float
    generation_config: Literal["auto", "vllm"]


class EngineSettings(OtherNames, total=False):
    """The fields of `EngineArgs`, and how many pictures and videos a request may have."""

    device: str
    dtype: Literal["auto", "float32", "bfloat16", "float16"]
    load_format: Literal["auto", "safetensors", "dummy"]
    max_model_len: int | None
    num_threads: int | None
    attention_backend: Literal["auto", "native", "torch", "triton", "flashinfer"]
    cpu_kernels: Literal["auto", "off"]
    gpu_kernels: Literal["auto", "triton", "torch"]
    quantization: Literal["none", "int8", "int4"]
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
    encoder_cache_mib: int
    encoder_host_cache_mib: int
    embedding_cache_dir: str | PathLike[str] | None
    embedding_cache_gib: float
    disable_vit_cuda_graph: bool
    max_video_frames: int
    video_sampling: Literal["transformers", "qwen-vl-utils", "time-grid"]
    video_fps: float | None
    video_frame_cap: bool
    video_reference: Literal["published", "transformers"]
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
    mm_encoder_tp_mode: Literal["one", "data"]
    max_running_requests: int
    max_queued_requests: int
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"]
    chunked_prefill_size: int
    enable_mixed_chunk: bool
    max_sessions: int
    session_timeout_s: float
    disable_overlap_schedule: bool
    max_decode_slowdown: float
    max_step_s: float
    speculative_algorithm: Literal["none", "ngram"]
    speculative_num_draft_tokens: int
    max_prefill_tokens: int
    schedule_conservativeness: float
    disable_cuda_graph: bool
    cuda_graph_max_bs: int | None
    cuda_graph_bs: str | None
    logits_processors: str | None
    grammar_timeout_s: float
    grammar_cache_mib: int
    enable_return_hidden_states: bool
    random_seed: int
    log_interval_s: float
    check_pools_when_idle: bool
    max_images_per_request: int
    max_videos_per_request: int
