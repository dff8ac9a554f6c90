"""A media worker: a process that makes patches of one medium after the other, in memory that its parent shares.

Its files come from strangers, so the kernel limits the resources that it can take (`vlmserve_common.process.limits`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from queue import Empty

from processors.families.base import MultimodalProcessor, ProcessorLimits
from processors.families.config import ProcessorConfig
from processors.inputs import Modality
from processors.pool.maker import DirectMaker, Made
from processors.pool.messages import ANSWER_MESSAGES, WORK_MESSAGES, WorkBegun, WorkFailed, WorkOrder, WorkRefused
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.child import Parent
from vlmserve_common.process.limits import ProcessLimits, allow_cpu_time, confine, return_memory
from vlmserve_common.transport.shm import SPARE_BYTES, SharedArrays
from vlmserve_common.transport.wire import MessageChannel

logger = logging.getLogger(__name__)

_GIB = 2**30
_IDLE_S = 1.0  # without work, then freed memory goes back
_FIXED_BYTES = 2 * _GIB  # the file and copies of it, patches and their spare blocks, stacks of threads
_BYTES_PER_PIXEL = 32  # of a picture: WebP with transparency takes 20
_BYTES_PER_SAMPLE = 20  # of a sound as it is heard: itself twice, once more with its ends mirrored, and its features
_BYTES_PER_FRAME_PIXEL = 128  # of a clip: 17 frames of 10 bits without subsampling take 113


@dataclass(frozen=True, kw_only=True, slots=True)
class MediaWorkerSettings:
    """Settings that a worker gets when it starts.

    `processor`, `config`, `limits`: the checkpoint's. `shared_dir`: an existing private directory for `SharedArrays`,
    on tmpfs. `picture_cpu_s`, `video_cpu_s`, `audio_cpu_s`: CPU seconds for one medium, after which the kernel ends the
    worker.
    """

    processor: type[MultimodalProcessor]
    config: ProcessorConfig
    limits: ProcessorLimits
    shared_dir: Path
    picture_cpu_s: float
    video_cpu_s: float
    audio_cpu_s: float

    def cpu_s(self, modality: Modality) -> float:
        """Return the CPU seconds for one medium."""
        limits = {
            Modality.IMAGE: self.picture_cpu_s,
            Modality.VIDEO: self.video_cpu_s,
            Modality.AUDIO: self.audio_cpu_s,
        }
        return limits[modality]

    @property
    def memory_bytes(self) -> int:
        """The memory that the largest allowed media can take."""
        pixels, frame_pixels = self.limits.decode.max_image_pixels, self.limits.video.max_frame_pixels
        sound = 0
        if self.config.audio is not None:
            sound = int(self.limits.audio.max_duration_s * self.config.audio.rate * _BYTES_PER_SAMPLE)
        return _FIXED_BYTES + max(_BYTES_PER_PIXEL * pixels, _BYTES_PER_FRAME_PIXEL * frame_pixels) + sound


def run_worker(
    parent: Parent,
    settings: MediaWorkerSettings,
    make_maker: Callable[[MultimodalProcessor], DirectMaker] = DirectMaker,
) -> None:
    """Report that the worker is ready, then process media. The process ends with its parent (`process.child`)."""
    import torch  # here: the parent imports this module, too, and does without

    torch.set_num_threads(1)
    shared = SharedArrays(settings.shared_dir, spare_bytes=SPARE_BYTES)
    maker = make_maker(settings.processor(settings.config, settings.limits, allocate=shared.empty))

    def receive() -> bytes:
        try:
            return parent.receive(_IDLE_S)
        except Empty:  # not after each medium: the next one would have to get it from the kernel again
            return_memory()
            return parent.receive()

    channel = MessageChannel(
        parent.send, receive, send_types=ANSWER_MESSAGES, receive_types=WORK_MESSAGES, shared=shared
    )
    confine(ProcessLimits(memory_bytes=settings.memory_bytes))
    parent.ready({})
    while True:
        order: WorkOrder = channel.receive()
        allow_cpu_time(settings.cpu_s(order.modality))
        channel.send(channel.encode(WorkBegun()))
        answer = _answer(maker, order, settings)
        try:
            frames = channel.encode(answer)
        except Exception as error:  # ours, not the medium's
            logger.exception("what became of a medium cannot be sent")
            frames = channel.encode(WorkFailed(message=f"{type(error).__name__}: {error}"))
        channel.send(frames)
        del order, answer, frames


def _answer(maker: DirectMaker, order: WorkOrder, settings: MediaWorkerSettings) -> Made | WorkRefused | WorkFailed:
    try:
        return maker.look(order.work()) if order.looks else maker.make(order.work())
    except Exception as error:
        if _is_out_of_memory(error):
            what = _too_much(order, settings)
            return WorkRefused(message=what, code="media_too_costly", status=400, out_of_memory=True)
        if isinstance(error, BadRequestError):
            return WorkRefused(message=error.message, code=error.code, status=error.status)
        logger.exception("a medium could not be processed")
        return WorkFailed(message=f"{type(error).__name__}: {error}")


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Return True if the error, or one of its causes, says so. torch has no class for that on a CPU."""
    while error is not None:
        if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and "allocate memory" in str(error)):
            return True
        error = error.__cause__
    return False


def _too_much(order: WorkOrder, settings: MediaWorkerSettings) -> str:
    setting = {
        Modality.IMAGE: "--max-image-pixels",
        Modality.VIDEO: "--max-video-frame-pixels",
        Modality.AUDIO: "--max-audio-duration-s",
    }[order.modality]
    return (
        f"the {order.what} takes more memory than the {settings.memory_bytes / _GIB:.1f} GiB that decoding one may "
        f"(they follow from {setting}): the process that decoded it was ended"
    )
