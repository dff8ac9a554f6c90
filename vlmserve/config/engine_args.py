"""The engine's settings, one definition for the CLI, the environment, YAML files and `LLM(...)`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal


def _arg(default: Any, help: str) -> Any:
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Everything the engine can be told. `vlmserve serve --help` shows the same texts."""

    model: str = field(metadata={"help": "checkpoint folder, or a Hugging Face hub id"})
    device: str = _arg("auto", "cpu, cuda, cuda:1 ...; auto takes the first GPU, else the CPU")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _arg(
        "auto", "compute type; auto is the checkpoint's own"
    )
    max_model_len: int | None = _arg(None, "context length in tokens, prompt and answer together; default: the model's")
    page_size: int = _arg(16, "KV cache slots in a page")
    max_total_tokens: int | None = _arg(None, "KV cache slots in all; default: sized from --mem-fraction-static")
    mem_fraction_static: float = _arg(
        0.8,
        "GPU: part of its memory for weights and KV cache; CPU: part of what the weights leave for the KV cache, "
        "never more than --cpu-kv-cache-gib",
    )
    cpu_kv_cache_gib: float = _arg(2.0, "upper limit of the KV cache on a CPU, in GiB")
    chunked_prefill_size: int = _arg(2048, "prompt tokens computed in one step at the most; -1: whole prompts")
    enable_mixed_chunk: bool = _arg(False, "let prompt chunks and decoding share a step")
    max_running_requests: int = _arg(64, "requests computed together at the most")
    max_prefill_tokens: int = _arg(8192, "prompt tokens admitted to one step at the most, over all requests")
    max_queued_requests: int = _arg(1024, "waiting requests above which new ones are answered 429")
    disable_radix_cache: bool = _arg(False, "do not reuse the KV cache of common prefixes")
    schedule_policy: Literal["fcfs", "lpm"] = _arg(
        "fcfs", "order of the waiting queue: first come, or longest prefix match"
    )
    schedule_conservativeness: float = _arg(1.0, "above 1 admits fewer requests, below 1 more (and retracts more)")
    attention_backend: Literal["torch"] = _arg("torch", "attention kernels")
    encoder_cache_mib: int = _arg(
        256, "memory for embeddings of pictures and videos, on the model's device: in use, in work or kept, in MiB"
    )
    encoder_host_cache_mib: int = _arg(
        1024, "GPU: host memory for embeddings that the device's had no more room for, in MiB"
    )
    embedding_cache_dir: str | None = _arg(
        None, "folder that keeps embeddings of pictures and videos for good, for any number of servers; default: none"
    )
    embedding_cache_gib: float = _arg(10.0, "limit of --embedding-cache-dir, in GiB")
    encoder_dp_size: int = _arg(
        0,
        "vision encoder processes beside the engine, which share its pictures; 0: one for each of --encoder-devices, "
        "and without these the engine encodes itself",
    )
    encoder_devices: str | None = _arg(
        None,
        "device of each encoder process, with commas between them (cuda:1,cuda:2), or one for all; default: cpu, or "
        "the GPUs behind the model's in turn",
    )
    encoder_threads: int | None = _arg(
        None, "CPU threads of each encoder process; default: an equal share of all cores"
    )
    encoder_timeout_s: float | None = _arg(
        None,
        "seconds after which an encoder process that is still at the same batch is taken to hang, and replaced; "
        "default: 600 where all of them are on GPUs, else 3600",
    )
    encoder_max_patches: int | None = _arg(
        None,
        "vision patches encoded in one step at the most (one larger picture goes alone); default: 1024 on a CPU, "
        "65536 on a GPU",
    )
    max_pixels: int | None = _arg(
        None,
        "largest area in pixels that a picture or a video's frame is resized to, whatever a request asks for; default: "
        "the checkpoint's own maximum",
    )
    low_detail_tokens: int = _arg(64, 'most tokens of a picture that is sent with detail "low"')
    video_sampling: Literal["transformers", "qwen-vl-utils", "time-grid"] = _arg(
        "transformers",
        "whose rule chooses a video's frames and their size: the checkpoint's transformers processor, qwen_vl_utils, "
        "or frames at whole multiples of 1/fps seconds, which overlapping parts of a file have in common",
    )
    video_fps: float | None = _arg(
        None, "frames a second taken of a video where the request does not say; default: the checkpoint's, else 2"
    )
    video_frame_cap: bool = _arg(
        False,
        "with --video-sampling transformers: cap each frame's pixels as qwen_vl_utils does (cap_pixels_per_frame)",
    )
    video_reference: Literal["published", "transformers"] = _arg(
        "published",
        "where they disagree on a video's place in the prompt: the published code of the models, or transformers 5.10 "
        "and later (Qwen3-VL: outer vision markers stay; Qwen2-VL, Qwen2.5-VL: text after a video ignores its time)",
    )
    max_video_frames: int = _arg(768, "most frames taken of one video")
    max_queued_media: int = _arg(
        1024, "pictures and videos being fetched and processed above which requests are answered 429"
    )
    processor_cache_mib: int = _arg(128, "limit of the cache of decoded and resized pictures and videos, in MiB")
    max_mm_workers: int = _arg(2, "threads that decode and resize media where no processes do")
    media_processes: int = _arg(
        2,
        "processes that decode and resize media, each within limits of memory and time, so that a file which breaks a "
        "decoder harms its own request only; 0: threads of the API process do",
    )
    enable_mm_embeds: bool = _arg(
        False, "take pictures as the vision tower's rows (image_embeds): only where all clients are trusted"
    )
    num_threads: int | None = _arg(None, "CPU threads of the model; default: all cores")
    random_seed: int = _arg(0, "seed of requests that bring none (offline LLM only; the server draws one each)")
    sampling_defaults: Literal["model", "openai"] = _arg(
        "model", "sampling values a request leaves out: the checkpoint's generation_config.json, or OpenAI's"
    )
    check_pools_when_idle: bool = _arg(True, "when idle, check that every KV slot and request row is accounted for")

    @property
    def num_encoders(self) -> int:
        """Vision encoder processes beside the engine."""
        return self.encoder_dp_size or (len(self.encoder_devices.split(",")) if self.encoder_devices else 0)
