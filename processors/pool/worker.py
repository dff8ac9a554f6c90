"""A media worker: a process that makes patches of one medium after the other, right where its parent will see them."""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch

from processors.families.base import MultimodalProcessor, ProcessedMedium
from processors.pool.maker import DirectMaker
from processors.pool.messages import (
    ANSWER_MESSAGES,
    WORK_MESSAGES,
    ClipWork,
    MediaWork,
    PictureWork,
    WorkBegun,
    WorkFailed,
    WorkRefused,
)
from processors.pool.worker_start import MediaWorkerSettings
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.channel import MessageChannel
from vlmserve_common.transport.shm import SPARE_BYTES, SharedArrays

logger = logging.getLogger(__name__)


def run_worker(
    parent: Parent,
    settings: MediaWorkerSettings,
    make_maker: Callable[[MultimodalProcessor], DirectMaker] = DirectMaker,
) -> None:
    """Say that it is ready, and process what comes; the process ends with its parent (`process.child`)."""
    torch.set_num_threads(1)
    with contextlib.suppress(OSError):  # when memory is short, this process goes first
        Path("/proc/self/oom_score_adj").write_text("500")
    shared = SharedArrays(settings.shared_dir, spare_bytes=SPARE_BYTES)
    processor_class, config, limits = pickle.loads(settings.processor)
    maker = make_maker(processor_class(config, limits, allocate=shared.empty))
    channel = MessageChannel(
        parent.send, parent.receive, send_types=ANSWER_MESSAGES, receive_types=WORK_MESSAGES, shared=shared
    )
    parent.ready({})
    while True:
        _answer_next(maker, channel)


def _answer_next(maker: DirectMaker, channel: MessageChannel) -> None:
    work = channel.receive()
    channel.send(channel.encode(WorkBegun()))
    answer = _answer(maker, work)
    try:
        frames = channel.encode(answer)
    except Exception as error:  # ours, not the medium's
        logger.exception("what became of a medium cannot be sent")
        frames = channel.encode(WorkFailed(message=f"{type(error).__name__}: {error}"))
    channel.send(frames)


def _answer(maker: DirectMaker, work: MediaWork) -> ProcessedMedium | WorkRefused | WorkFailed:
    try:
        return _make(maker, work)
    except BadRequestError as error:
        return WorkRefused(message=error.message, code=error.code, status=error.status)
    except Exception as error:
        logger.exception("a medium could not be processed")
        return WorkFailed(message=f"{type(error).__name__}: {error}")


def _make(maker: DirectMaker, work: MediaWork) -> ProcessedMedium:
    data = work.data.tobytes()
    if isinstance(work, PictureWork):
        return maker.picture(data, work.knobs)
    if isinstance(work, ClipWork):
        return maker.clip(data, work.knobs)
    ends = np.cumsum((0, *work.sizes)).tolist()
    return maker.frames([data[start:end] for start, end in pairwise(ends)], work.knobs)
