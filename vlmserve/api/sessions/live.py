"""The live video of one session: frames on their way from a connection into the conversation.

Frames wait in a queue, are loaded by temporal patches, and join the conversation when it is free: while an answer is
being written that stays in it, they wait. Queue and patches are bounded; beyond that the connection is not read.
"""

from __future__ import annotations

import asyncio
import io
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

from PIL import Image

from processors.processed import ProcessedVideo, nbytes_of
from vlmserve.api.body import BodyBudget
from vlmserve.api.sessions.protocol import LiveState
from vlmserve.frontend.live import FrameClock, LiveRules, Units
from vlmserve_common.errors import BadRequestError

PICTURE, RGB, DELTA, KEY = 1, 2, 3, 4
"""Kinds of frames: a file, RGB pixels, and pictures of an H.264 stream, which begin with a key picture."""
_HEAD = struct.Struct("<Bd")
_SIZE = struct.Struct("<II")
_MOST_UNITS = 600  # of H.264 from one keyframe to the next
_MOST_FRAMES = 128
_MOST_BYTES = 64 * 2**20
"""Frames of a session that have not joined its conversation, and their bytes, before its connection is no longer read.
So many bytes of H.264 may also come from one key picture to the next."""


@dataclass(slots=True, eq=False)
class _Group:
    """What holds the bytes of frames: one file, or H.264 from a key picture on."""

    units: list[bytes] = field(default_factory=list)
    nbytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Frame:
    """A frame that is used. time: in seconds of the session's video. picture: a file, H.264, or loaded already. group:
    holds its bytes."""

    time: float
    picture: bytes | Units | ProcessedVideo
    group: _Group


Load = Callable[[Sequence[bytes | Units]], Awaitable[ProcessedVideo]]
"""Loads the frames of a temporal patch."""
Join = Callable[[], Awaitable[None]]
"""Takes loaded temporal patches (`LiveVideo.take_loaded`) into the conversation."""


def parse_frame(message: bytes) -> tuple[int, float, bytes]:
    """Return the kind and time of a frame in a message, and its data; RGB becomes a file. Raises BadRequestError."""
    if len(message) < _HEAD.size:
        raise _bad(f"a message of {len(message)} bytes holds no frame; its kind and time take {_HEAD.size}")
    kind, time = _HEAD.unpack_from(message)
    if kind in (PICTURE, DELTA, KEY):
        return kind, time, message[_HEAD.size :]
    if kind != RGB:
        raise _bad(
            f"a frame's kind is {kind}; it must be {PICTURE} (a picture file), {RGB} (RGB), {KEY} or {DELTA} (H.264, a "
            "key picture or another one)"
        )
    start = _HEAD.size + _SIZE.size
    width, height = _SIZE.unpack_from(message, _HEAD.size) if len(message) >= start else (0, 0)
    if not width or not height or len(message) - start != 3 * width * height:
        raise _bad(
            f"a frame of {width}x{height} pixels comes with {max(0, len(message) - start)} bytes; RGB takes "
            f"{3 * width * height}, which must be more than none"
        )
    return PICTURE, time, _picture_file(message[start:], (width, height))


def _picture_file(pixels: bytes, size: tuple[int, int]) -> bytes:
    """Return an uncompressed picture file, for workers that open files."""
    file = io.BytesIO()
    Image.frombuffer("RGB", size, pixels).save(file, "BMP")
    return file.getvalue()


def _bad(message: str) -> BadRequestError:
    return BadRequestError(message, code="invalid_frame")


class LiveVideo:
    """Frames on their way into one conversation.

    received: frames that came. used: those that the rate left over. done: those of them that are in the conversation,
    or were given up. tokens: of the prompt when frames joined it last. budget: of the bytes of frames that wait.
    """

    def __init__(self, rules: LiveRules, budget: BodyBudget) -> None:
        self.rules = rules
        self.received = self.used = self.done = self.tokens = 0
        self._clock = FrameClock(rules.fps)
        self._budget = budget
        self._frames: deque[Frame] = deque()
        self._aside: tuple[Frame, ...] = ()  # frames that a question shows which is to stay
        self._group = _Group()  # of H.264, since the last keyframe
        self._held = 0  # bytes of the budget
        self._loaded: deque[ProcessedVideo] = deque()
        self._source: tuple[int, int] | None = None
        self._streamed: bool | None = None  # whether this connection brings H.264
        self._changed = asyncio.Event()
        self._running = self._ending = False
        self.pulled: LiveState = {}  # type: ignore[typeddict-item]  # what is said of a stream that the server pulls

    @property
    def now(self) -> float | None:
        """Return the time of the last frame that came, in seconds since the first one."""
        return self._clock.now

    @property
    def state(self) -> LiveState:
        """Return it as clients see it."""
        counts = {name: getattr(self, name) for name in ("received", "used", "done", "tokens")}
        return {**counts, "time": self._clock.now, **self.pulled}  # type: ignore[typeddict-item]

    @property
    def nbytes(self) -> int:
        """Return the memory of frames that are loaded and not in the conversation."""
        waiting = [frame.picture for frame in (*self._aside, *self._frames)]
        return sum(nbytes_of(video) for video in (*self._loaded, *waiting) if isinstance(video, ProcessedVideo))

    def begin(self) -> None:
        """Take frames of a connection, which has a clock of its own. A frame of the last one that waits for its second
        one is given up. Raises BadRequestError (409) if there is a connection."""
        if self._running:
            raise BadRequestError("frames of this session come over another connection", code="stream_open", status=409)
        self._running, self._ending = True, False
        self._clock.restart()
        self._source = self._streamed = None
        self.give_up()

    def end(self) -> None:
        """Take no more frames. `run` ends when all whole temporal patches have joined the conversation."""
        self._ending = True
        self._notify()

    def take(self, kind: int, time: float, data: bytes) -> None:
        """Take a frame. Raises BadRequestError for a time that does not rise, and (503) if frames take too much
        memory."""
        now, due = self._clock.take(time)
        self.received += 1
        streamed = kind in (DELTA, KEY)
        if self._streamed not in (None, streamed):
            raise _bad("pictures and H.264 come over one connection; use one for each")
        self._streamed = streamed
        if streamed:
            self._take_unit(kind, data)
        if due:
            if streamed:
                frame = Frame(time=now, picture=Units(tuple(self._group.units)), group=self._group)
            else:
                self._hold(len(data))
                frame = Frame(time=now, picture=data, group=_Group(nbytes=len(data)))
            self._frames.append(frame)
            self.used += 1
            self._notify()

    def _take_unit(self, kind: int, data: bytes) -> None:
        if kind == KEY:
            self._begin_units()
        elif not self._group.units:
            raise _bad("an H.264 stream begins with a key picture, and with each connection anew")
        if len(self._group.units) == _MOST_UNITS:
            raise _bad(f"{_MOST_UNITS} pictures of H.264 came since the last key picture, which is the limit")
        if (nbytes := self._group.nbytes + len(data)) > _MOST_BYTES:
            raise _bad(f"{nbytes} bytes of H.264 came since the last key picture, the limit is {_MOST_BYTES}")
        self._hold(len(data))
        self._group.units.append(data)
        self._group.nbytes = nbytes

    def _begin_units(self) -> None:
        self._group = _Group()
        self._release()

    def _hold(self, count: int) -> None:
        self._budget.take(count)
        self._held += count

    def _release(self) -> None:
        """Give back the room of what no frame needs any more."""
        groups = {self._group, *(frame.group for frame in (*self._aside, *self._frames))}
        self._hold(sum(group.nbytes for group in groups) - self._held)

    async def room(self) -> None:
        """Wait until there is room for another frame."""
        await self._until(
            lambda: self.used - self.done < _MOST_FRAMES and self._held - self._group.nbytes < _MOST_BYTES
        )

    async def run(self, load: Load, join: Join) -> None:
        """Load frames, and let them join the conversation, until `end`. Raises what `load` and `join` raise. What came
        before a frame that cannot be loaded still joins; other frames on their way are given up then."""
        loading, joining = asyncio.create_task(self._load(load)), asyncio.create_task(self._join(join))
        try:
            await asyncio.wait((loading, joining), return_when=asyncio.FIRST_EXCEPTION)
            if not joining.done():
                self._pop(len(self._frames))
                self.end()
                await asyncio.wait((joining,))
            await asyncio.gather(loading, joining)
            if odd := tuple(self._frames):  # a question may see it for as long as the session is there
                video = await self.loaded(odd, load)
                if tuple(self._frames) == odd:
                    self._frames = deque(replace(frame, picture=video, group=_Group()) for frame in odd)
        except BaseException:
            for task in (loading, joining):
                task.cancel()
            self.give_up()
            await asyncio.gather(loading, joining, return_exceptions=True)
            raise

    def stop(self) -> None:
        """Note that the connection is gone: nobody waits for more frames."""
        self._begin_units()
        self._running = False
        self._notify()

    def give_up(self) -> None:
        """Forget all frames on their way."""
        self._loaded.clear()
        self._aside, self.done = (), self.used
        self._frames.clear()
        self._begin_units()

    async def loaded(self, frames: Sequence[Frame], load: Load) -> ProcessedVideo:
        """Return a temporal patch of frames; a missing last one is that before. Raises BadRequestError."""
        if isinstance(frames[0].picture, ProcessedVideo):
            return frames[0].picture
        video = await load([frame.picture for frame in frames if not isinstance(frame.picture, ProcessedVideo)])
        if self._source not in (None, video.source_size):
            (width, height), (old_width, old_height) = video.source_size, self._source or (0, 0)
            raise _bad(
                f"a frame has {width}x{height} pixels, those before it had {old_width}x{old_height}: send frames of "
                "another size over a new connection"
            )
        self._source = video.source_size
        return self.rules.patch(video, [frame.time for frame in frames])

    async def _load(self, load: Load) -> None:
        depth = self.rules.depth
        while True:
            await self._until(lambda: not self._aside and (len(self._frames) >= depth or self._ending))
            if len(self._frames) < depth:
                return
            self._loaded.append(await self.loaded([self._frames[place] for place in range(depth)], load))
            self._pop(depth)
            self._notify()

    def _pop(self, count: int) -> None:
        for _ in range(count):
            self._frames.popleft()
        self._release()

    async def _join(self, join: Join) -> None:
        while True:
            await self._until(
                lambda: self._loaded or (self._ending and not self._aside and len(self._frames) < self.rules.depth)
            )
            if not self._loaded:
                return
            await join()
            self._notify()

    def take_loaded(self) -> list[ProcessedVideo]:
        """Return the temporal patches that are to join the conversation now, in order."""
        taken = list(self._loaded)
        self._loaded.clear()
        return taken

    def have_joined(self, patches: int, tokens: int) -> None:
        """Note that so many temporal patches are in the conversation, which has so many tokens."""
        self.done += patches * self.rules.depth
        self.tokens = tokens

    def seen(self) -> Seen:
        """Return what a question that comes now sees."""
        odd = tuple(self._frames)[len(self._frames) - len(self._frames) % self.rules.depth :]
        if self._aside and self.used - self.done == len(self._aside):
            odd = self._aside
        return Seen(self, self.used - len(odd), odd)

    def set_aside(self, odd: tuple[Frame, ...]) -> None:
        """Take frames of a part of a temporal patch for a question that is to stay, until `put_back`: none is loaded
        meanwhile. If others came since, they are shown once more with these."""
        if odd and tuple(self._frames) == odd:
            self._aside = odd
            self._frames.clear()

    def keep(self) -> None:
        """Note that the frames set aside stay in the conversation as they are."""
        self.done += len(self._aside)
        self._aside = ()
        self._release()

    def put_back(self) -> None:
        """Let the frames set aside wait again, if they have not stayed."""
        self._frames.extendleft(reversed(self._aside))
        self._aside = ()
        self._notify()

    async def until_done(self, count: int) -> None:
        """Wait until so many used frames are done, or no more will be."""
        await self._until(lambda: self.done >= count or not self._running)

    async def until_more(self, done: int) -> None:
        """Wait until more than so many used frames are done."""
        await self._until(lambda: self.done > done)

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _until(self, condition: Callable[[], object]) -> None:
        while not condition():
            await self._changed.wait()


@dataclass(frozen=True, slots=True)
class Seen:
    """What a question sees: the frames that came before it. until: how many are done then, whole temporal patches of
    them. odd: those of the patch that waits for its last one."""

    live: LiveVideo
    until: int
    odd: tuple[Frame, ...]

    async def settled(self) -> None:
        """Wait until whole temporal patches are in the conversation."""
        await self.live.until_done(self.until)

    @property
    def missing(self) -> tuple[Frame, ...]:
        """Return the frames that are not in the conversation."""
        return self.odd if self.live.done <= self.until else ()
