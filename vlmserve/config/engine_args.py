"""The engine's settings, one definition for the CLI, the environment, YAML files and `LLM(...)`."""

from __future__ import annotations

import math
import re
from dataclasses import MISSING, dataclass
from pathlib import Path
from typing import Literal

from vlmserve.config.fields import ABOVE_0, AT_LEAST_0, AT_LEAST_1, CACHE_SIZE, SECONDS, Allowed, settings_of


@dataclass(frozen=True, kw_only=True)
class StartSettings:
    """Settings of the start of a process.

    shared_dir: a private directory for large arrays. startup_timeout_s: the most seconds for a server's start, and
    later for one process. ready_by: the end of the server's start, by `time.monotonic`, which is the same in all
    processes.
    """

    shared_dir: Path
    log_level: str = "info"
    startup_timeout_s: float = 600.0
    ready_by: float = math.inf


_model, _pictures, _videos, _encoder = map(settings_of, ("model", "pictures", "videos", "vision encoder"))
_memory, _scheduling, _other = map(settings_of, ("memory", "scheduling", "other"))
_parallel, _adapters = map(settings_of, ("several devices", "adapters"))

_SIZES = r" *0*[1-9]\d* *(, *0*[1-9]\d* *)*"
AUTO, CHECKPOINT = "auto", "checkpoint"


def _are_devices(names: str) -> bool:
    return all(re.fullmatch(r"cpu|cuda(:\d+)?", name) for name in names.split(","))


_DEVICE = Allowed(
    words="auto, cpu, cuda (a GPU) or cuda:N", holds=lambda name: re.fullmatch(r"auto|cpu|cuda(:\d+)?", name)
)
_TEMPLATE = Allowed(
    words="a file, or a text of Jinja, which has a {",
    holds=lambda text: "{" in text or Path(text).expanduser().is_file(),
)
_DEVICES = Allowed(words="cpu, cuda or cuda:N, with commas between them", holds=_are_devices)
_FRACTION = Allowed(words="above 0 and at most 1", holds=lambda value: 0 < value <= 1)
_POSITIVE = Allowed(words="above 0", holds=lambda value: value > 0)
_PRUNING = Allowed(words="at least 0 and at most 0.99", holds=lambda value: 0 <= value <= 0.99)
_NOT_NEGATIVE = Allowed(words="0 or more", holds=lambda value: value >= 0)
_SEED = Allowed(words="between 0 and 2**63 - 1", holds=lambda value: 0 <= value < 2**63)
_PROCESSES = Allowed(words="0 (threads do the work) or more", holds=lambda value: value >= 0)
_MAX_PIXELS = Allowed(
    words="auto, checkpoint, or a whole number of 1 or more",
    holds=lambda value: value in (AUTO, CHECKPOINT) or (isinstance(value, int) and value >= 1),
)
_AUTO_OR_COUNT = Allowed(
    words="auto, or a whole number of 0 (none) or more",
    holds=lambda value: value == AUTO or (isinstance(value, int) and value >= 0),
)
_BATCH_SIZES = Allowed(
    words="whole numbers of 1 or more, with commas between them", holds=lambda sizes: re.fullmatch(_SIZES, sizes)
)
_ENCODERS = Allowed(words="0 (none beside the engine) or more", holds=lambda value: value >= 0)
_PLACE = r"(\[[\da-fA-F:.%]+\]|[^\s:/,\[\]]+):0*\d{1,5}"
_LISTEN = Allowed(
    words="HOST:PORT, with a port of 0 (the system chooses) to 65535",
    holds=lambda place: re.fullmatch(_PLACE, place) and int(place.rpartition(":")[2]) <= 65535,
)
_LINKS = Allowed(
    words="tcp://HOST:PORT, with commas between several",
    holds=lambda urls: all(
        re.fullmatch(rf"tcp://{_PLACE}", url) and 0 < int(url.rpartition(":")[2]) <= 65535 for url in urls.split(",")
    ),
)
_SECRET = Allowed(words="a key", holds=bool)
_URL = Allowed(words="a URL such as http://127.0.0.1:8001/v1", holds=lambda url: re.fullmatch(r"https?://[!-~]+", url))
_ADAPTERS = Allowed(
    words="NAME=FOLDER, with commas between several, or one FOLDER with --merge-lora",
    holds=lambda given: all(one.partition("=")[0] for one in given.split(",")),
)


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """All settings of the engine. `vlmserve serve --help-all` shows the same texts."""

    model: str = _model(MISSING, "checkpoint folder, or a Hugging Face hub id", common=True)
    revision: str | None = _model(None, "branch, tag or commit of a hub id; default: the hub's main branch")
    chat_template: str | None = _model(
        None,
        "chat template in place of the checkpoint's: a file of Jinja, or the Jinja itself",
        _TEMPLATE,
        common=True,
    )
    task: Literal["auto", "generate", "embed", "rerank"] = _model(
        "auto",
        "what the model is served for: answers, embeddings, or scores of documents for a query; auto: what the "
        "checkpoint's modules.json says, else generate",
        common=True,
    )
    pooling: Literal["auto", "last", "mean"] = _model(
        "auto", "embeddings: the last token's state, or the mean of all; auto: what the checkpoint says, else last"
    )
    device: str = _model("auto", "cpu, cuda, cuda:1 ...; auto takes the first GPU, else the CPU", _DEVICE, common=True)
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto", "compute type; auto is the checkpoint's own", common=True
    )
    load_format: Literal["auto", "safetensors", "dummy"] = _model(
        "auto", "dummy: random weights, made on the device, to measure with; auto is the checkpoint's safetensors"
    )
    max_model_len: int | None = _model(
        None, "context length in tokens: prompt and answer together; default: the model's", AT_LEAST_1, common=True
    )
    num_threads: int | None = _model(None, "CPU threads of the model; default: all cores", AT_LEAST_1)
    attention_backend: Literal["auto", "native", "torch", "triton", "flashinfer"] = _model(
        "auto",
        "the decoder's attention; auto: our own operators (native) on a CPU that has them, else torch's; on a GPU the "
        "first of flashinfer, triton and torch that passes a trial at the start",
        common=True,
    )
    cpu_kernels: Literal["auto", "off"] = _model(
        "auto",
        "our own operators on a CPU, built with the machine's C++ compiler at the first start; off: torch's, slower",
    )
    gpu_kernels: Literal["auto", "triton", "torch"] = _model(
        "auto",
        "norms, rotation, KV writes, gates, delta nets and sampling on a GPU: fused, in Triton, or by torch in many "
        "launches, and products with weights of 4 bits: in Triton, or dequantised; auto: Triton where a trial shows "
        "that it works",
    )
    quantization: Literal["none", "int8", "int4", "w8a8"] = _model(
        "none",
        "round the weights of decoder and head to 8 or 4 bits while loading (needs our own operators); w8a8: weights "
        "of decoder and vision tower, and the activations that they multiply, to 8 bits (needs AVX512-VNNI, too); "
        "AWQ, GPTQ and FP8 checkpoints need no setting",
        common=True,
    )
    sampling_defaults: Literal["model", "openai"] = _model(
        "model",
        "source of the sampling values that a request leaves out; model: generation_config.json; openai: OpenAI's "
        "defaults",
    )
    max_pixels: int | str = _pictures(
        AUTO,
        "largest area, in pixels, of a resized picture or frame; checkpoint: the checkpoint's own limit; auto: the "
        "same on a GPU; on a CPU the area that it encodes in --max-pixels-auto-s, measured at the start",
        _MAX_PIXELS,
        common=True,
    )
    max_pixels_auto_s: float = _pictures(
        20.0, "CPU: about how many seconds one picture may be encoded; sets --max-pixels auto", SECONDS
    )
    low_detail_tokens: int = _pictures(64, 'most tokens of a picture with detail "low"', AT_LEAST_1)
    max_queued_media: int = _pictures(
        1024,
        "most pictures and videos that may be fetched and processed at a time; beyond that requests are answered 429",
        AT_LEAST_1,
    )
    max_mm_workers: int = _pictures(2, "threads that decode and resize media with --media-processes 0", AT_LEAST_1)
    media_processes: int = _pictures(
        2,
        "processes that decode and resize media, each within limits of memory and time, so that a file which breaks a "
        "decoder harms its own request only; 0: threads of the API process do",
        _PROCESSES,
        common=True,
    )
    enable_mm_embeds: bool = _pictures(
        False,
        "take embeddings in place of media (image_embeds, video_embeds); only where you trust all clients",
    )
    processor_cache_mib: int = _pictures(
        128, "cache of pictures and videos that are decoded (and, on the CPU, resized), in MiB", CACHE_SIZE
    )
    resize_device: Literal["cpu", "model"] = _pictures(
        "cpu",
        "where pictures and frames are resized: by the CPU that decodes them, or by the vision tower's device, to the "
        "same pixels; model: for a GPU; originals of more than twice the height or width stay with the CPU",
    )
    encoder_dp_size: int = _encoder(
        0,
        "vision encoder processes; 0: one for each of --encoder-devices, or none without it (the engine encodes)",
        _ENCODERS,
    )
    encoder_devices: str | None = _encoder(
        None,
        "devices of the encoder processes (cuda:1,cuda:2), or one device for all of them; default: cpu, or the GPUs "
        "after the model's",
        _DEVICES,
        common=True,
    )
    encoder_threads: int | None = _encoder(
        None, "CPU threads of each encoder process; default: an equal share of all cores", AT_LEAST_1
    )
    encoder_timeout_s: float | None = _encoder(
        None,
        "seconds for one batch, after which an encoder process is replaced; default: 600 if all are on GPUs, else 3600",
        SECONDS,
    )
    encoder_max_patches: int | None = _encoder(
        None,
        "most vision patches in one step; a larger picture goes alone; default: 1024 on a CPU, 65536 on a GPU",
        AT_LEAST_1,
    )
    encoder_cache_mib: int | None = _encoder(
        None,
        "memory for embeddings on the model's device, in MiB; default: a 32nd of what is free beside the weights, with "
        "room for 8192 tokens of pictures at the least and 262144 at the most",
        CACHE_SIZE,
        common=True,
    )
    encoder_host_cache_mib: int = _encoder(
        1024, "GPU: host memory for embeddings that the device has no room for, in MiB", CACHE_SIZE
    )
    embedding_cache_dir: str | None = _encoder(
        None, "folder that keeps embeddings across restarts; several servers may share it; default: none", common=True
    )
    embedding_cache_gib: float = _encoder(10.0, "limit of --embedding-cache-dir, in GiB", ABOVE_0)
    disable_vit_cuda_graph: bool = _encoder(
        False, "GPU: launch every kernel of the vision encoder by itself, also for small pictures"
    )
    encoder_urls: str | None = _encoder(
        None,
        "encoders on other servers (--role encode): tcp://HOST:PORT, their --encoder-listen, with commas between them; "
        "they encode, and this server what they fail to do",
        _LINKS,
        common=True,
    )
    encoder_peer_timeout_s: float = _encoder(
        60.0,
        "seconds that --encoder-urls may take for a picture, or two frames of a video, before this server encodes it",
        SECONDS,
    )
    encoder_listen: str = _encoder(
        "127.0.0.1:8997",
        "--role encode: HOST:PORT where other servers ask for embeddings; use a private network, since the connection "
        "is not encrypted",
        _LISTEN,
    )
    skip_repeats: bool = _pictures(
        False,
        "leave out parts of pictures and videos that repeat what is beside them or was there before, pixel by pixel, "
        "unless the request says",
    )
    max_video_frames: int = _videos(768, "most frames used of one video", AT_LEAST_1, common=True)
    video_sampling: Literal["transformers", "qwen-vl-utils", "time-grid"] = _videos(
        "transformers",
        "whose rule chooses frames and their size: the checkpoint's processor in transformers, qwen_vl_utils, or a "
        "grid of 1/fps seconds that overlapping parts of a file share",
    )
    video_fps: float | None = _videos(
        None,
        "frames a second used of a video, unless the request says; default: the checkpoint's, else 2",
        ABOVE_0,
        common=True,
    )
    video_frame_cap: bool = _videos(
        False,
        "with --video-sampling transformers: limit each frame's pixels as qwen_vl_utils does (cap_pixels_per_frame)",
    )
    video_reference: Literal["published", "transformers"] = _videos(
        "published",
        "how a video stands in the prompt; published: as in the models' published code; transformers: as in "
        "transformers 5.10 and later (Qwen3-VL keeps the outer vision markers; in Qwen2-VL and Qwen2.5-VL, text "
        "after a video ignores its time)",
    )
    video_pruning_rate: float = _videos(
        0.0,
        "share of a video's tokens that leaves, those that change least (EVS), unless the request says: 0 to 0.99",
        _PRUNING,
    )
    embedder_url: str | None = _videos(
        None,
        'server of embeddings that compares the frames of long videos with questions ("sampling": "question"): '
        "http://HOST:PORT/v1; default: none",
        _URL,
    )
    embedder_model: str | None = _videos(None, "model of --embedder-url; default: the first one that it lists")
    embedder_api_key: str | None = _videos(
        None, "key for --embedder-url; set it by its variable, which others cannot read", _SECRET
    )
    embedder_timeout_s: float = _videos(
        20.0,
        "seconds that --embedder-url may take for a video, before its frames are chosen by what changes in it",
        SECONDS,
    )
    mem_fraction_static: float = _memory(
        0.8,
        "GPU: fraction of its memory for weights and KV cache together; CPU: fraction of the memory beside the weights "
        "for the KV cache, which --cpu-kv-cache-gib limits, too",
        _FRACTION,
        common=True,
    )
    cpu_kv_cache_gib: float = _memory(2.0, "upper limit of the KV cache on a CPU, in GiB", ABOVE_0, common=True)
    max_total_tokens: int | None = _memory(
        None, "KV cache slots in all; default: from --mem-fraction-static", AT_LEAST_1
    )
    kv_cache_dtype: Literal["auto", "fp8_e4m3", "int8"] = _memory(
        "auto",
        "number format of the KV cache: auto is --dtype; fp8_e4m3 and int8 take half of bfloat16's memory; int8 has a "
        "scale for each token and head, and is the more exact of the two; on a GPU, FlashInfer does not read int8",
        common=True,
    )
    mamba_cache_mib: int = _memory(
        1024,
        "Qwen3.5, Qwen4Exp: memory in MiB for the prefix cache's states of recurrent layers; running requests have "
        "states of their own beside it; 0: none, so the prefix cache finds nothing",
        CACHE_SIZE,
    )
    mamba_track_interval: int = _memory(
        512,
        "Qwen3.5, Qwen4Exp: keep a state for the prefix cache every so many tokens, rounded up to whole pages and 64 "
        "tokens; the ends of prompts, pictures and videos have one in any case",
        AT_LEAST_1,
    )
    page_size: int = _memory(16, "KV cache slots in a page", AT_LEAST_1)
    disable_radix_cache: bool = _memory(False, "turn the prefix cache off: do not reuse the KV of common prefixes")
    radix_eviction_policy: Literal["lru", "lfu", "fifo", "priority"] = _memory(
        "lru",
        "which cached prefix is evicted first; lru: the least recently used; lfu: the one with the fewest hits; "
        "fifo: the oldest; priority: the one of the lowest priority",
    )
    enable_hierarchical_cache: bool = _memory(
        False, "keep cached prefixes that the KV cache has no room for in host memory, and bring them back", common=True
    )
    hicache_size_gib: float = _memory(4.0, "host memory of each rank for --enable-hierarchical-cache, in GiB", ABOVE_0)
    hicache_write_policy: Literal["write_back", "write_through_selective"] = _memory(
        "write_back",
        "which evicted prefixes go to host memory; write_back: all; write_through_selective: those that were "
        "used twice",
    )
    hicache_storage_dir: str | None = _memory(
        None,
        "folder that keeps prefixes which the host memory of --enable-hierarchical-cache has no room for, also across "
        "restarts; default: none",
    )
    hicache_storage_gib: float = _memory(32.0, "limit of --hicache-storage-dir, in GiB", ABOVE_0)
    enable_sleep_mode: bool = _memory(
        False, "CPU: let POST /sleep give the memory of weights and KV cache back to the system until POST /wake_up"
    )
    tp_size: int = _parallel(
        1,
        "devices that share the model's layers (tensor parallel): a process for each, on GPUs from --device on, or on "
        "the CPU's cores",
        AT_LEAST_1,
        common=True,
    )
    pp_size: int = _parallel(
        1,
        "stages that the model's layers are spread over (pipeline parallel), each of --tp-size devices; while a stage "
        "works on one step, the next stage works on the step before",
        AT_LEAST_1,
        common=True,
    )
    dp_size: int = _parallel(
        1,
        "whole models (replicas) behind one server: each has its own scheduler, KV cache and devices, the next ones "
        "from --device on, or a share of the CPU's cores",
        AT_LEAST_1,
        common=True,
    )
    enable_dp_attention: bool = _parallel(
        False,
        "split the --tp-size ranks into --dp-size groups, each with requests and KV of its own; all ranks share "
        "the rest of the model; for models of few key-value heads and many experts (--ep-size)",
    )
    load_balance_method: Literal["affinity", "round_robin", "shortest_queue"] = _parallel(
        "affinity",
        "which replica gets a request; affinity: the one that has most of its prompt and pictures, unless others "
        "have much less work; round_robin: each in turn; shortest_queue: the one with the least work",
    )
    ep_size: int = _parallel(
        1,
        "parties of the --tp-size ranks, each with whole experts of its own (expert parallel); the ranks of a "
        "party split each expert; it divides --tp-size",
        AT_LEAST_1,
        common=True,
    )
    moe_a2a_backend: Literal["auto", "none", "torch"] = _parallel(
        "auto",
        "how tokens reach experts; none: all ranks have all tokens, and add up their results; torch: each row is "
        "sent to the ranks of its experts; auto: the way that moves less data",
    )
    enable_eplb: bool = _parallel(
        False, "count how often each expert is chosen, and move busy experts to ranks with less work"
    )
    ep_num_redundant_experts: int = _parallel(
        0, "with --enable-eplb: extra copies of busy experts, over all of --ep-size", _NOT_NEGATIVE
    )
    eplb_rebalance_num_iterations: int = _parallel(
        1000, "with --enable-eplb: steps between two placements of the experts", AT_LEAST_1
    )
    nnodes: int = _parallel(
        1, "machines that --tp-size times --pp-size is spread over; the same command is given on each", AT_LEAST_1
    )
    node_rank: int = _parallel(0, "this machine's number; 0 is the one that takes requests", _NOT_NEGATIVE)
    dist_init_addr: str | None = _parallel(
        None,
        "HOST:PORT of machine 0, where machines meet; use a private network, since the connection is not encrypted",
    )
    role: Literal["all", "encode", "prefill", "decode"] = _parallel(
        "all",
        "the server's part of the work; encode: load the vision tower alone, and encode for the --encoder-urls of "
        "other servers; prefill: compute prompts for decode servers; decode: have the --prefill-urls compute prompts, "
        "and make answers; all: everything",
        common=True,
    )
    prefill_urls: str | None = _parallel(
        None,
        "--role decode: prefill servers, tcp://HOST:PORT as their --prefill-listen, with commas between them; this "
        "server computes what they do not",
        _LINKS,
        common=True,
    )
    prefill_listen: str = _parallel(
        "127.0.0.1:8998",
        "--role prefill: HOST:PORT where decode servers order prompts; replicas take the next ports, and KV further "
        "ones; use a private network, since nothing is encrypted",
        _LISTEN,
    )
    prefill_peer_timeout_s: float = _parallel(
        10.0, "seconds of silence after which another server of --prefill-urls is taken for lost", SECONDS
    )
    kv_transport: Literal["auto", "tcp", "nixl"] = _parallel(
        "auto",
        "how KV goes from prefill to decode servers; tcp: through both servers' CPUs; nixl: the decode server reads "
        "the other's memory by itself, with RDMA or NVLink where there is any (needs vlmserve[disaggregation]), and "
        "by tcp from servers without it; auto: nixl where it is installed and KV is on a GPU",
    )
    peer_key: str | None = _parallel(
        None,
        "secret that servers which work together prove to each other that they know; set it by its variable; default: "
        "none is asked for",
        _SECRET,
    )
    mm_encoder_tp_mode: Literal["one", "data"] = _parallel(
        "one",
        "with several ranks; one: the first rank encodes pictures and hands rows on; data: an encoder process on "
        "every rank's device encodes, each with the whole tower",
    )
    max_running_requests: int = _scheduling(64, "most requests computed together", AT_LEAST_1, common=True)
    max_queued_requests: int = _scheduling(
        1024,
        "most requests that may wait, besides --max-running-requests; beyond that requests are answered 429",
        AT_LEAST_1,
        common=True,
    )
    schedule_policy: Literal["fcfs", "lpm", "dfs-weight", "lof", "srtf", "random", "priority"] = _scheduling(
        "fcfs",
        "order of a client's waiting requests; fcfs: first come; lpm: longest cached prefix; dfs-weight: common "
        "prefixes together; lof: longest answer; srtf: shortest answer; random; priority: lowest number, which also "
        "takes places from running requests",
        common=True,
    )
    chunked_prefill_size: int = _scheduling(
        2048,
        "most prompt tokens computed in one step; longer prompts are cut into chunks; -1: whole prompts",
        common=True,
    )
    enable_mixed_chunk: bool = _scheduling(True, "let prompt chunks and decoding share a step")
    max_sessions: int = _scheduling(
        256, "most conversations (session_id) whose KV is kept between turns; 0: none", _NOT_NEGATIVE
    )
    session_timeout_s: float = _scheduling(600.0, "seconds that a conversation's KV is kept after a turn", _POSITIVE)
    disable_overlap_schedule: bool = _scheduling(False, "decide a step only when the step before has ended")
    max_decode_slowdown: float | None = _scheduling(
        None,
        "how many times longer other clients' prompts and pictures may make the time between tokens; 0: no limit; "
        "default: 2, and 0 for LLM and caption, where nobody reads along",
        _NOT_NEGATIVE,
    )
    max_time_between_tokens_s: float | None = _scheduling(
        None,
        "seconds between tokens while more requests of the same client get ready, where that ends them all sooner; "
        "default: 0.25, and five steps on a machine that is slow",
        SECONDS,
    )
    max_step_s: float = _scheduling(
        0.2,
        "seconds that a chunk of a prompt or picture takes at most, about, while nothing decodes; 0: no limit; a "
        "prompt's chunk may take five steps of decoding, if these take longer",
        _NOT_NEGATIVE,
    )
    speculative_algorithm: Literal["none", "ngram", "mtp", "eagle3", "draft_model"] = _scheduling(
        "none",
        "guess next tokens and check several in one step, with the same answers; ngram: guess the tokens that "
        "followed the last ones earlier in prompt or answer; mtp: guess with the MTP head of a Qwen3.5 or Qwen4Exp "
        "checkpoint; eagle3: guess with the EAGLE-3 head of --speculative-draft-model-path; draft_model: guess with "
        "the smaller model there",
        common=True,
    )
    speculative_draft_model_path: str | None = _scheduling(
        None,
        "checkpoint folder or id of what guesses: an EAGLE-3 head made for the model, or a smaller model with the same "
        "tokens, with a tower of the same family or without one",
    )
    speculative_num_draft_tokens: int | str = _scheduling(
        AUTO,
        "tokens guessed at a time; auto: 4 at most (8 without an algorithm, where the grammar of an answer leaves one "
        "text on), and fewer or none where that is faster; 0: none",
        _AUTO_OR_COUNT,
    )
    max_prefill_tokens: int = _scheduling(
        8192, "most prompt tokens in one step, also with --chunked-prefill-size -1", AT_LEAST_1
    )
    schedule_conservativeness: float = _scheduling(
        1.0, "above 1: admit fewer requests; below 1: admit more, and retract running ones more often", _POSITIVE
    )
    disable_cuda_graph: bool = _scheduling(
        False, "GPU: launch every kernel of a decode step by itself, instead of a captured step (CUDA graph) as a whole"
    )
    cuda_graph_max_bs: int | None = _scheduling(
        None,
        "GPU: requests of the largest decode step that is captured; default: --max-running-requests, at most 256",
        AT_LEAST_1,
    )
    cuda_graph_bs: str | None = _scheduling(
        None,
        "GPU: requests of each decode step that is captured, with commas between them (1,2,4,8); a step is computed as "
        "the next larger one; default: 1, 2, 4, then multiples of 8, of 16 and of 32",
        _BATCH_SIZES,
    )
    enable_lora: bool = _adapters(
        False, "take LoRA adapters (folders of PEFT), from --lora-paths or at run time", common=True
    )
    lora_paths: str | None = _adapters(
        None,
        "adapters that are there from the start: NAME=FOLDER, several with spaces or commas between them; requests "
        "choose one by its name as model",
        _ADAPTERS,
        common=True,
        several=True,
    )
    merge_lora: bool = _adapters(
        False,
        "add the one adapter of --lora-paths to the weights while loading: answers are all its own, at the model's "
        "speed",
    )
    max_loras_per_batch: int = _adapters(
        8, "most adapters among the requests computed together; more requests wait", AT_LEAST_1
    )
    max_lora_rank: int = _adapters(64, "highest rank of an adapter", AT_LEAST_1)
    max_loaded_loras: int = _adapters(
        64,
        "most adapters in memory; of more, those used longest ago go, and are read again when a request names them; "
        "pinned ones stay",
        AT_LEAST_1,
    )
    allowed_lora_path: str | None = _adapters(
        None,
        "folder below which adapters that are loaded at run time, or named by other servers, must lie; default: "
        "anywhere, so set it where others have the admin key",
    )
    lora_partial: bool = _adapters(
        False,
        "take adapters of which only some modules are in the model, and leave the others out; answers say so in their "
        "warnings",
    )
    logits_processors: str | None = _other(
        None,
        "classes that requests may call by name to change logits: MODULE:CLASS, with commas between them; they are "
        "your code and run in the engine",
    )
    grammar_timeout_s: float = _other(
        10.0, "seconds that compiling a JSON schema, regular expression or grammar of a request may take", SECONDS
    )
    grammar_cache_mib: int = _other(256, "memory for compiled grammars that no request has, in MiB", CACHE_SIZE)
    enable_return_hidden_states: bool = _other(False, "let requests ask for hidden states (return_hidden_states)")
    random_seed: int = _other(
        0, "LLM only: seed of the first request without one; the server draws a seed for each", _SEED
    )
    log_interval_s: float = _other(
        10.0,
        "seconds of work after which the scheduler logs a line: requests, KV cache, hits, tokens a second; 0: never",
        AT_LEAST_0,
    )
    check_pools_when_idle: bool = _other(True, "when idle, check that every KV slot and request row is accounted for")

    @property
    def decode_slowdown(self) -> float:
        """Return --max-decode-slowdown as a number; 0 is no limit."""
        return 2.0 if self.max_decode_slowdown is None else self.max_decode_slowdown

    @property
    def most_drafts(self) -> int:
        """Return the most tokens of a request that are guessed at a time."""
        if isinstance(self.speculative_num_draft_tokens, int):
            return self.speculative_num_draft_tokens
        return 8 if self.speculative_algorithm == "none" else 4

    @property
    def adapters_at_start(self) -> tuple[tuple[str, str], ...]:
        """Return --lora-paths as pairs of a name and a folder; none if the weights have the adapter."""
        if self.merge_lora or not self.lora_paths:
            return ()
        pairs = (one.strip().partition("=") for one in self.lora_paths.split(","))
        return tuple((name, folder) for name, _, folder in pairs)

    @property
    def merged_adapter(self) -> Path | None:
        """Return the folder of the adapter that the weights have, if they have one."""
        return Path((self.lora_paths or "").rpartition("=")[2]) if self.merge_lora else None

    @property
    def cuda_graph_sizes(self) -> tuple[int, ...] | None:
        """Return --cuda-graph-bs as numbers."""
        return tuple(map(int, self.cuda_graph_bs.split(","))) if self.cuda_graph_bs is not None else None

    @property
    def world_size(self) -> int:
        """Return the number of ranks of one model. The rank is stage * tp_size + number within the stage."""
        return self.tp_size * self.pp_size

    @property
    def num_replicas(self) -> int:
        """Return the number of whole models behind one server."""
        return 1 if self.enable_dp_attention else self.dp_size

    @property
    def attention_groups(self) -> int:
        """Return the number of groups among the ranks of one model that have requests of their own."""
        return self.dp_size if self.enable_dp_attention else 1

    @property
    def own_ranks(self) -> range:
        """Return the ranks of this machine."""
        count = self.world_size // self.nnodes
        return range(self.node_rank * count, (self.node_rank + 1) * count)

    @property
    def encodes_on_all_ranks(self) -> bool:
        """Return True if each of this machine's ranks has an encoder process beside it."""
        given = self.encoder_dp_size or self.encoder_devices
        return self.mm_encoder_tp_mode == "data" and self.world_size > 1 and not given

    @property
    def num_encoders(self) -> int:
        """Return the number of vision encoder processes beside the engine."""
        if self.encodes_on_all_ranks:
            return len(self.own_ranks)
        return self.encoder_dp_size or (len(self.encoder_devices.split(",")) if self.encoder_devices else 0)
