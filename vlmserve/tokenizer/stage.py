"""Puts the tokenizer stage of a checkpoint together: the same one for the server and for the offline `LLM`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from processors.base import ProcessorLimits
from processors.decoding import DecodeLimits
from processors.fetching import FetchSettings, MediaFetcher
from processors.pool import PoolSettings, ProcessorPool
from processors.registry import make_processor
from processors.video_options import VideoLimits, VideoOptions
from vlmserve.engine_args import EngineArgs
from vlmserve.media import RequestMedia
from vlmserve.tokenizer.chat_template import load_chat_template
from vlmserve.tokenizer.request_builder import RequestBuilder, RequestLimits
from vlmserve.tokenizer.sampling import load_sampling_defaults
from vlmserve.tokenizer.text_tokenizer import TextTokenizer, load_text_tokenizer, read_json


@dataclass(frozen=True, kw_only=True)
class StageLimits:
    """fetch, decode: what media may reach and cost. max_images, max_videos: most of them in a request.

    max_video_duration_s, max_video_frame_pixels: of a video file, in seconds and pixels. max_video_decode_s: the
    time that decoding it may take.
    """

    fetch: FetchSettings = field(default_factory=FetchSettings)
    decode: DecodeLimits = field(default_factory=DecodeLimits)
    max_images: int = 64
    max_videos: int = 8
    max_video_duration_s: float = 7200.0
    max_video_decode_s: float = 300.0
    max_video_frame_pixels: int = 4096 * 4096


@dataclass(frozen=True, kw_only=True)
class TokenizerStage:
    """Everything between a request and its `TokenizedGenerateReqInput`. Close `media` when done."""

    tokenizer: TextTokenizer
    media: RequestMedia
    builder: RequestBuilder


def make_tokenizer_stage(args: EngineArgs, limits: StageLimits, *, max_model_len: int) -> TokenizerStage:
    """args.model: the checkpoint folder; max_model_len: prompt and answer of one request together, in tokens.

    Raises CheckpointError for a folder that lacks a tokenizer, a chat template or a processor.
    """
    folder = Path(args.model)
    config = read_json(folder / "config.json")
    tokenizer = load_text_tokenizer(folder)
    processor = make_processor(folder, config, _processor_limits(args, limits, max_model_len), tokenizer.continue_text)
    pool = PoolSettings(
        max_workers=args.max_mm_workers, max_queued=args.max_queued_media, cache_mib=args.processor_cache_mib
    )
    media = RequestMedia(processor, ProcessorPool(processor, MediaFetcher(limits.fetch), pool))
    # the model's vocabulary may be padded beyond the tokenizer's
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size") or tokenizer.num_ids
    builder = RequestBuilder(
        tokenizer=tokenizer,
        template=load_chat_template(folder),
        expander=media,
        limits=RequestLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size,
            max_images=limits.max_images,
            max_videos=limits.max_videos,
        ),
        defaults=load_sampling_defaults(folder, args.sampling_defaults),
    )
    return TokenizerStage(tokenizer=tokenizer, media=media, builder=builder)


def _processor_limits(args: EngineArgs, limits: StageLimits, max_model_len: int) -> ProcessorLimits:
    return ProcessorLimits(
        decode=limits.decode,
        max_pixels=args.max_pixels,
        embeds=args.enable_mm_embeds,
        low_detail_tokens=args.low_detail_tokens,
        video=VideoLimits(
            max_duration_s=limits.max_video_duration_s,
            max_decode_s=limits.max_video_decode_s,
            max_frames=args.max_video_frames,
            max_frame_pixels=limits.max_video_frame_pixels,
            max_tokens=max_model_len,
        ),
        video_options=VideoOptions(
            sampling=args.video_sampling,
            fps=args.video_fps,
            cap_pixels_per_frame=True if args.video_frame_cap else None,
            reference=args.video_reference,
        ),
    )
