"""Puts the API process together: tokenizer, template, processors, TokenizerManager and the HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from fastapi import FastAPI

from processors.base import ProcessorLimits
from processors.decoding import DecodeLimits
from processors.fetching import FetchSettings, MediaFetcher
from processors.pool import PoolSettings, ProcessorPool
from processors.registry import make_processor
from vlmserve.media import RequestMedia
from vlmserve.messages import SchedulerInput, TokenizerManagerInput
from vlmserve.server.app import ApiSettings, build_app
from vlmserve.settings import ServerSettings
from vlmserve.tokenizer.chat_template import load_chat_template
from vlmserve.tokenizer.request_builder import RequestBuilder, RequestLimits
from vlmserve.tokenizer.sampling import load_sampling_defaults
from vlmserve.tokenizer.text_tokenizer import load_text_tokenizer, read_json
from vlmserve.tokenizer.tokenizer_manager import TokenizerManager


class ApiFrontend:
    """The API process's half of a server. `app` is the ASGI application; the rest is the launcher's."""

    def __init__(self, manager: TokenizerManager, media: RequestMedia, app: FastAPI) -> None:
        self.app = app
        self.manager = manager
        self._media = media

    def handle(self, message: TokenizerManagerInput) -> None:
        """Take a message from the detokenizer."""
        self.manager.handle(message)

    def fail_all(self, message: str) -> None:
        """Answer every pending and every later request with 503 and the message."""
        self.manager.fail(message)

    async def close(self) -> None:
        """Free threads and connections."""
        self.manager.close()
        await asyncio.to_thread(self._media.close)


def make_frontend(
    settings: ServerSettings, *, max_model_len: int, model_name: str, send: Callable[[SchedulerInput], None]
) -> ApiFrontend:
    """Call it in the running event loop. settings.engine.model: the checkpoint folder; max_model_len: in tokens.

    Raises CheckpointError for a folder that lacks a tokenizer, a chat template or a processor.
    """
    engine = settings.engine
    folder = Path(engine.model)
    config = read_json(folder / "config.json")
    decode = DecodeLimits(max_image_pixels=settings.max_image_pixels)
    processor = make_processor(folder, config, ProcessorLimits(decode=decode))
    fetcher = MediaFetcher(
        FetchSettings(
            allow_private_media=settings.allow_private_media,
            allowed_local_media_path=settings.allowed_local_media_path,
            max_bytes=settings.media_max_bytes,
            timeout_s=settings.media_timeout_s,
            max_redirects=settings.media_max_redirects,
        )
    )
    pool = ProcessorPool(processor, fetcher, PoolSettings(max_workers=engine.max_mm_workers))
    media = RequestMedia(processor, pool)
    vocab_size = config.get("vocab_size") or config.get("text_config", {}).get("vocab_size")
    tokenizer = load_text_tokenizer(folder)
    builder = RequestBuilder(
        tokenizer=tokenizer,
        template=load_chat_template(folder),
        expander=media,
        limits=RequestLimits(
            max_model_len=max_model_len,
            vocab_size=vocab_size or tokenizer.num_ids,
            max_images=settings.max_images_per_request,
        ),
        defaults=load_sampling_defaults(folder, engine.sampling_defaults),
    )
    manager = TokenizerManager(
        builder=builder,
        media=media,
        send=send,
        max_pending=engine.max_running_requests + engine.max_queued_requests,
    )
    api = ApiSettings(
        api_keys=(settings.api_key,) if settings.api_key else (),
        max_body_bytes=int(settings.max_body_mib * 2**20),
    )
    return ApiFrontend(manager, media, build_app(manager, [model_name], api))
