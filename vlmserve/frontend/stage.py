"""Puts the tokenizer stage of a checkpoint together: the same one for the server and for the offline `LLM`."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from processors.audio.options import AudioLimits
from processors.families.base import ContinueText, MultimodalProcessor, ProcessorLimits
from processors.families.registry import make_processor
from processors.fetch.embedder import Embedder
from processors.fetch.fetching import MediaFetcher
from processors.fetch.limits import FetchSettings
from processors.image.decoding import DecodeLimits
from processors.pool.maker import MediaMaker
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pruning import Pruning
from processors.video.options import VideoLimits, VideoOptions
from vlmserve.config.engine_args import AUTO, EngineArgs, StartSettings
from vlmserve.config.settings import ServerSettings
from vlmserve.executor.logits_processors import load_logits_processors
from vlmserve.frontend.chat_messages import MediaCounts
from vlmserve.frontend.media import RequestMedia
from vlmserve.frontend.request_builder import RequestBuilder, RequestLimits
from vlmserve.frontend.sampling import load_sampling_defaults
from vlmserve.frontend.tasks import load_template, read_task
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer, load_text_tokenizer


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """Limits on media. fetch, decode: addresses they may come from, and sizes. counts: most media in a request.

    max_video_duration_s, max_video_frame_pixels: of a video file, in seconds and pixels. max_video_decode_s: the
    time that decoding it may take. max_image_decode_s: the time that a picture may take in a media process. audio: of
    sounds.
    """

    fetch: FetchSettings = field(default_factory=FetchSettings)
    decode: DecodeLimits = field(default_factory=DecodeLimits)
    counts: MediaCounts = field(default_factory=MediaCounts)
    max_image_decode_s: float = 10.0
    max_video_duration_s: float = 7200.0
    max_video_decode_s: float = 300.0
    max_video_frame_pixels: int = 4096 * 4096
    audio: AudioLimits = field(default_factory=AudioLimits)


@dataclass(frozen=True, kw_only=True)
class TokenizerStage:
    """The parts that turn a request into its `TokenizedGenerateReqInput`s. Close `media` when done."""

    tokenizer: TextTokenizer
    media: RequestMedia
    builder: RequestBuilder


def make_tokenizer_stage(
    args: EngineArgs,
    limits: StageLimits,
    *,
    max_model_len: int,
    auto_pixels: int | None = None,
    start: StartSettings | None = None,
) -> TokenizerStage:
    """Make the stage. args.model: the checkpoint folder; max_model_len: prompt and answer of one request together, in
    tokens.

    auto_pixels, start: as of `make_request_media`. Raises CheckpointError for a folder that lacks a tokenizer, a chat
    template or a processor, EngineError for media processes that cannot be started.
    """
    folder = Path(args.model)
    config = read_hf_config(folder)
    tokenizer = load_text_tokenizer(folder)
    # before anything is started that would have to be closed
    task = read_task(folder, args.task, args.pooling, tokenizer)
    template = load_template(folder, args.chat_template, task)
    defaults = load_sampling_defaults(folder, args.sampling_defaults)
    media = make_request_media(
        args,
        limits,
        max_model_len=max_model_len,
        auto_pixels=auto_pixels,
        continue_text=tokenizer.continue_text,
        start=start,
    )
    # the model's vocabulary may be padded beyond the tokenizer's
    text_config = config.get("text_config", {})
    vocab_size = config.get("vocab_size") or text_config.get("vocab_size") or tokenizer.num_ids
    builder = RequestBuilder(
        tokenizer=tokenizer,
        template=template,
        expander=media,
        limits=RequestLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            hidden_size=config.get("hidden_size") or text_config.get("hidden_size") or 0,
            counts=limits.counts,
            hidden_states=args.enable_return_hidden_states,
            replicas=args.dp_size,
            answers=args.role != "prefill",
            task=task,
            reads_ids=bool(text_config.get("ple_layer_ids")),
        ),
        defaults=defaults,
        logits_processors=load_logits_processors(args.logits_processors),
    )
    return TokenizerStage(tokenizer=tokenizer, media=media, builder=builder)


def make_request_media(
    args: EngineArgs,
    limits: StageLimits,
    *,
    max_model_len: int,
    auto_pixels: int | None = None,
    continue_text: ContinueText | None = None,
    start: StartSettings | None = None,
) -> RequestMedia:
    """Make the part of the stage that loads media. continue_text: the tokenizer's; only expanding prompts needs it.

    auto_pixels: what `--max-pixels auto` comes to here, None for the checkpoint's own limit. start: needed where `args`
    asks for any. Raises CheckpointError for a folder that lacks a processor, EngineError for media processes that
    cannot be started.
    """
    folder = Path(args.model)
    processor = make_processor(
        folder,
        read_hf_config(folder),
        _processor_limits(args, limits, max_model_len, auto_pixels),
        continue_text,
    )
    pool = PoolSettings(
        max_workers=args.max_mm_workers,
        max_queued=args.max_queued_media,
        cache_mib=args.processor_cache_mib,
    )
    maker = _start_processes(args, limits, processor, start) if args.media_processes and processor.sees else None
    embedder = None
    if args.embedder_url is not None:
        embedder = Embedder(
            args.embedder_url.rstrip("/"),
            model=args.embedder_model,
            api_key=args.embedder_api_key,
            timeout_s=args.embedder_timeout_s,
        )
    return RequestMedia(processor, ProcessorPool(processor, MediaFetcher(limits.fetch), pool, maker, embedder))


def stage_limits(settings: ServerSettings) -> StageLimits:
    """Read the limits from a server's settings."""
    domains = settings.allowed_media_domains
    return StageLimits(
        fetch=FetchSettings(
            allow_private_media=settings.allow_private_media,
            allowed_media_domains=None if domains is None else tuple(domains.split(",")),
            allowed_local_media_path=settings.allowed_local_media_path,
            max_bytes=settings.media_max_bytes,
            max_video_bytes=settings.max_video_bytes,
            max_audio_bytes=settings.max_audio_bytes,
            timeout_s=settings.media_timeout_s,
            max_redirects=settings.media_max_redirects,
        ),
        decode=DecodeLimits(max_image_pixels=settings.max_image_pixels),
        counts=MediaCounts(
            images=settings.max_images_per_request,
            videos=settings.max_videos_per_request,
            audios=settings.max_audios_per_request,
        ),
        max_image_decode_s=settings.max_image_decode_s,
        max_video_duration_s=settings.max_video_duration_s,
        max_video_decode_s=settings.max_video_decode_s,
        max_video_frame_pixels=settings.max_video_frame_pixels,
        audio=AudioLimits(
            max_duration_s=settings.max_audio_duration_s,
            max_channels=settings.max_audio_channels,
            max_decode_s=settings.max_audio_decode_s,
        ),
    )


def _start_processes(
    args: EngineArgs, limits: StageLimits, processor: MultimodalProcessor, start: StartSettings | None
) -> MediaMaker:
    assert start is not None, "media processes need a directory for arrays"
    # Imported here because only media processes need it.
    from processors.pool.process_maker import ProcessMaker, ProcessSettings

    maker = ProcessMaker(
        processor,
        ProcessSettings(
            count=args.media_processes,
            shared_dir=start.shared_dir,
            picture_s=limits.max_image_decode_s,
            video_s=limits.max_video_decode_s,
            audio_s=limits.audio.max_decode_s,
            startup_timeout_s=start.startup_timeout_s,
            log_level=start.log_level,
        ),
    )
    try:
        maker.wait_ready()
    except BaseException:
        maker.close_now()
        raise
    return maker


def _processor_limits(
    args: EngineArgs, limits: StageLimits, max_model_len: int, auto_pixels: int | None
) -> ProcessorLimits:
    auto, given = args.max_pixels == AUTO, args.max_pixels
    return ProcessorLimits(
        decode=limits.decode,
        max_pixels=auto_pixels if auto else given if isinstance(given, int) else None,
        tell_max_pixels=auto,
        embeds=args.enable_mm_embeds,
        resize_later=args.resize_device == "model",
        low_detail_tokens=args.low_detail_tokens,
        pruning=Pruning(skip_repeats=args.skip_repeats, rate=args.video_pruning_rate),
        video=VideoLimits(
            max_duration_s=limits.max_video_duration_s,
            max_decode_s=limits.max_video_decode_s,
            max_frames=args.max_video_frames,
            max_frame_pixels=limits.max_video_frame_pixels,
            max_tokens=max_model_len,
        ),
        audio=replace(limits.audio, max_tokens=max_model_len),
        video_options=VideoOptions(
            sampling=args.video_sampling,
            fps=args.video_fps,
            cap_pixels_per_frame=True if args.video_frame_cap else None,
            reference=args.video_reference,
        ),
    )
