"""Encoders for other servers, in threads of the tests, and a network between that does harm."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from multiprocessing.connection import wait

import numpy as np
import torch

from tests.vision.fake_backend import EMBED_SHAPE, ROW_BYTES, FakeBackend, mark
from vision.cache.embedding_cache import EmbeddingCache, MemoryTier
from vision.encoder_pool import EncoderPool, PoolLimits
from vision.remote.encode_service import EncodeService, PixelsOnDemand
from vision.remote.encoder_server import EncoderServer
from vision.remote.protocol import TowerIdentity
from vision.remote.remote_backend import BATCHES_AHEAD, RemoteBackend
from vision.towers.temporal_patch import EncodeBatch, TemporalPatch
from vision.workers.backend import EncoderBackend, EncodeResult
from vlmserve_common.process.loop_thread import LoopThread
from vlmserve_common.process.wake_up import WakeUp

TOWER = TowerIdentity(family="fake", fingerprint="00" * 32, dtype="int32", width=EMBED_SHAPE.width, merge=2)
PIXEL_WIDTH = 64


def picture(number: int, grid: tuple[int, int] = (4, 4)) -> TemporalPatch:
    pixels = np.random.default_rng(number).integers(0, 256, (grid[0] * grid[1], PIXEL_WIDTH), dtype=np.uint8)
    return TemporalPatch(digest=number.to_bytes(32, "little"), grid=grid, pixels=pixels)


def rows_of(patch: TemporalPatch) -> torch.Tensor:
    """int32 [n, 2]: whose rows, and what they were made of."""
    sums = torch.from_numpy(patch.pixels.reshape(len(patch.pixels) // 4, -1).sum(1, dtype=np.int32))
    return torch.stack((torch.full_like(sums, mark(patch.digest)), sums), dim=1)


class PixelTower(FakeBackend):
    """Workers that make rows of the pixels. open: whether they finish by themselves; `finish` is for when they do not.

    batches: what was started. fail: digests whose batches fail, as often as the number says.
    """

    def __init__(self, workers: int = 1) -> None:
        super().__init__(workers, inline=False, cancels=True)
        self.open = True

    def finish(self, worker: int = 0) -> None:
        batch = self.queues[worker].popleft()
        if any(self.fail.get(patch.digest, 0) > 0 for patch in batch.patches):
            for patch in batch.patches:
                self.fail[patch.digest] = self.fail.get(patch.digest, 0) - 1
            self.results.append(EncodeResult(number=batch.number, embeds=None, error="RuntimeError: poisoned"))
        else:
            self.results.append(EncodeResult(number=batch.number, embeds=tuple(map(rows_of, batch.patches))))

    def collect(self) -> list[EncodeResult]:
        for worker, queue in self.queues.items():
            while queue and self.open:
                self.finish(worker)
        return super().collect()

    def wait_handles(self) -> list[int]:
        return []


class Encoder:
    """An encoder with a pool of its own, in a thread. backend: what encodes."""

    def __init__(
        self,
        backend: EncoderBackend | None = None,
        *,
        tower: TowerIdentity = TOWER,
        key: str | None = None,
        shape=EMBED_SHAPE,
        space_bytes: int = 10_000 * ROW_BYTES,
    ) -> None:
        self.backend = backend or PixelTower()
        on_demand = PixelsOnDemand(self.backend)
        listener = socket.create_server(("127.0.0.1", 0))
        self.port = listener.getsockname()[1]
        self.server = EncoderServer(listener, tower, key)
        self.pool = EncoderPool(
            on_demand,
            EmbeddingCache(MemoryTier(space_bytes, torch.device("cpu"))),
            fingerprint=bytes.fromhex(tower.fingerprint),
            embed_shape=shape,
            limits=PoolLimits(max_patches=64, space_bytes=space_bytes),
        )
        self.service = EncodeService(self.pool, on_demand, self.server)
        self._stopped, self._stop = False, WakeUp()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    @property
    def stats(self):
        return self.service.stats()

    def _run(self) -> None:
        while not self._stopped:
            if not self.service.step(1.0):
                wait([self._stop.fd, *self.service.wait_handles()], 0.02)

    def close(self) -> None:
        if self._thread.is_alive():
            self._stopped = True
            self._stop.call()
            self._thread.join()
            self.server.close()
            self._stop.close()


class Network:
    """A proxy in front of an encoder. harm: what is done once, to which direction ("out" is to the encoder), after how
    many bytes of it: "cut", "garble" one byte, or "stall" both for good. passed: bytes so far, of each direction."""

    def __init__(self, port: int) -> None:
        self.harm: tuple[str, str, int] | None = None
        self.passed = {"out": 0, "in": 0}
        self._to = port
        self.stalled = False
        self._writers: list[asyncio.StreamWriter] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = LoopThread("network")
        self._server = self._thread.run(asyncio.start_server(self._join, sock=self._listener))

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.append(writer)
        try:
            back_reader, back_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.close()
            return
        self._writers.append(back_writer)
        flows = [("out", reader, back_writer), ("in", back_reader, writer)]
        tasks = [asyncio.create_task(self._flow(*flow)) for flow in flows]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for one in (writer, back_writer):
            one.close()

    async def _flow(self, direction: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := bytearray(await reader.read(2**16)):
                passed = self.passed[direction]
                self.passed[direction] += len(data)
                if self.harm is not None and self.harm[1] == direction and self.harm[2] < passed + len(data):
                    (kind, _, after), self.harm = self.harm, None
                    place = max(0, after - passed)
                    if kind == "cut":
                        writer.write(data[:place])
                        await writer.drain()
                        return
                    if kind == "stall":
                        self.stalled = True
                    data[place] ^= 0x10
                while self.stalled:
                    await asyncio.sleep(0.01)
                writer.write(data)
                await writer.drain()

    async def _end(self) -> None:
        self._server.close()
        self.stalled = False
        for writer in self._writers:
            writer.transport.abort()
        await asyncio.wait(asyncio.all_tasks() - {asyncio.current_task()}, timeout=0.1)

    def close(self) -> None:
        self._thread.run(self._end())
        self._thread.close()


@contextlib.contextmanager
def consumer(*urls: str, home=None, tower=TOWER, key=None, timeout_s: float = 30.0) -> Iterator[RemoteBackend]:
    """A backend over encoders, once all its links have been tried."""
    home = home or PixelTower()
    backend = RemoteBackend(home, urls, tower=tower, rows=EMBED_SHAPE.of, key=key, timeout_s=timeout_s)
    try:
        yield backend
    finally:
        backend.close()


def consumer_pool(backend: RemoteBackend, shape=EMBED_SHAPE, space_bytes: int = 10_000 * ROW_BYTES) -> EncoderPool:
    """A pool over a remote backend."""
    return EncoderPool(
        backend,
        EmbeddingCache(MemoryTier(space_bytes, torch.device("cpu"))),
        fingerprint=bytes(32),
        embed_shape=shape,
        limits=PoolLimits(max_patches=1, space_bytes=space_bytes, batches_ahead=BATCHES_AHEAD),
        link_stats=backend.stats,
    )


def batch_of(number: int, patch: TemporalPatch | None = None) -> EncodeBatch:
    return EncodeBatch(number=number, patches=(patch or picture(number),))
