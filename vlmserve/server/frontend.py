"""Puts the API process together: tokenizer, template, processors, TokenizerManager and the HTTP application."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastapi import FastAPI

from processors.decoding import DecodeLimits
from processors.fetching import FetchSettings
from vlmserve.media import RequestMedia
from vlmserve.messages import SchedulerInput, TokenizerManagerInput
from vlmserve.server.app import ApiSettings, build_app
from vlmserve.settings import ServerSettings
from vlmserve.tokenizer.stage import StageLimits, make_tokenizer_stage
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
    fetch = FetchSettings(
        allow_private_media=settings.allow_private_media,
        allowed_local_media_path=settings.allowed_local_media_path,
        max_bytes=settings.media_max_bytes,
        max_video_bytes=settings.max_video_bytes,
        timeout_s=settings.media_timeout_s,
        max_redirects=settings.media_max_redirects,
    )
    limits = StageLimits(
        fetch=fetch,
        decode=DecodeLimits(max_image_pixels=settings.max_image_pixels),
        max_images=settings.max_images_per_request,
        max_videos=settings.max_videos_per_request,
        max_video_duration_s=settings.max_video_duration_s,
        max_video_frame_pixels=settings.max_video_frame_pixels,
    )
    engine = settings.engine
    stage = make_tokenizer_stage(engine, limits, max_model_len=max_model_len)
    manager = TokenizerManager(
        builder=stage.builder,
        media=stage.media,
        send=send,
        max_pending=engine.max_running_requests + engine.max_queued_requests,
    )
    api = ApiSettings(
        api_keys=(settings.api_key,) if settings.api_key else (),
        max_body_bytes=int(settings.max_body_mib * 2**20),
    )
    return ApiFrontend(manager, stage.media, build_app(manager, [model_name], api))
