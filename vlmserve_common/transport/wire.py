"""Messages as frames of bytes: msgspec MessagePack, numpy arrays and torch tensors out of band, never pickle.

A message is a dataclass. Frame 0 is its type's name, frame 1 its MessagePack body. There ``[dtype, shape, place]``
stands for an array. A place is a frame's index or, for large arrays with a `SharedArrays`, a block's name. A tensor
goes as the array of its values on the CPU. The place of a `HeldArray` is the block that holds it. Decoding a message of
unknown type, or one that does not fit its type, raises `WireError`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from vlmserve_common.errors import VlmserveError
from vlmserve_common.transport.held import HeldArray
from vlmserve_common.transport.shm import SharedArrays

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

Frame = bytes | bytearray | memoryview
SHARED_FROM_BYTES = 64 * 1024
_KINDS = frozenset("biuf?")
_BITS = {"bfloat16": "uint16"}  # the array's type where it is not the tensor's


class WireError(VlmserveError):
    """A message cannot be encoded or decoded."""


def join(frames: Sequence[Frame]) -> bytes:
    """Join frames into one, for `split`."""
    return msgspec.msgpack.encode(frames)


def split(joined: Frame) -> Sequence[Frame]:
    """Return views of the frames that were joined. WireError if these are none."""
    try:
        return msgspec.msgpack.decode(joined, type=list[memoryview])
    except msgspec.MsgspecError as error:
        raise WireError(f"these bytes are no frames: {error}") from error


class WireCodec:
    """Encodes and decodes the given dataclass types. One codec per end of a channel; not thread-safe.

    shared: where arrays of `SHARED_FROM_BYTES` and more go; None sends every array as a frame of its own, as happens
    when there is no room (containers often get 64 MiB): slower, but it gets there.
    """

    def __init__(self, types: Iterable[type], shared: SharedArrays | None = None) -> None:
        self._shared = shared
        self._decoders: dict[str, msgspec.msgpack.Decoder[Any]] = {
            cls.__name__: msgspec.msgpack.Decoder(cls, dec_hook=self._decode_value, strict=True) for cls in types
        }
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_value)
        # State of the message in work: its frames, its blocks, and the arrays met so far, so that an array that stands
        # in it several times travels once.
        self._frames: list[Frame] = []
        self._put: list[str] = []
        self._places: dict[int, list[object]] = {}
        self._kept: list[np.ndarray] = []
        self._arrays: dict[int | str, np.ndarray] = {}

    @property
    def blocks(self) -> tuple[str, ...]:
        """The shared blocks that hold arrays of the message encoded last."""
        return tuple(self._put)

    def encode(self, message: object) -> list[Frame]:
        """A message's frames. Raises WireError for a type this codec was not made for."""
        name = type(message).__name__
        if name not in self._decoders:
            raise WireError(f"no message type {name!r} on this channel, only {sorted(self._decoders)}")
        self._frames, self._put, self._places, self._kept = [name.encode(), b""], [], {}, []
        try:
            body = self._encoder.encode(message)
        except BaseException:
            for block in self._put if self._shared else []:
                self._shared.discard(block)  # type: ignore[union-attr]
            raise
        frames, self._frames = self._frames, []
        frames[1] = body
        return frames

    def decode(self, frames: Sequence[Frame]) -> Any:
        """The message in some frames; its arrays are views of the frames, or the content of shared blocks."""
        if len(frames) < 2:
            raise WireError(f"a message has at least 2 frames, got {len(frames)}")
        name = bytes(frames[0]).decode("utf-8", "replace")
        decoder = self._decoders.get(name)
        if decoder is None:
            raise WireError(f"no message type {name!r} on this channel, only {sorted(self._decoders)}")
        self._frames, self._arrays = list(frames), {}
        try:
            return decoder.decode(frames[1])
        except Exception as error:
            self.discard(frames)
            raise WireError(f"{name}: {error}") from error
        finally:
            self._frames, self._arrays = [], {}

    def discard(self, frames: Sequence[Frame]) -> None:
        """Free the shared blocks named in an encoded message that will not, or cannot, be decoded."""
        if self._shared is None:
            return
        try:
            todo = [msgspec.msgpack.decode(frames[1])]
        except msgspec.MsgspecError:
            return
        while todo:
            value = todo.pop()
            if isinstance(value, dict):
                todo.extend(value.values())
            elif isinstance(value, list):
                todo.extend(value)
            elif isinstance(value, str) and self._shared.is_block_name(value):
                self._shared.discard(value)

    def _encode_value(self, value: object) -> object:
        if isinstance(value, np.ndarray):
            return self._encode_array(value)
        if isinstance(value, HeldArray):
            return self._encode_held(value)
        if isinstance(value, np.generic):
            return value.item()
        # not by isinstance: processes without tensors do without torch
        if type(value).__module__ == "torch":
            import torch

            if isinstance(value, torch.Tensor):
                return self._encode_tensor(value)
        raise NotImplementedError(f"cannot send a {type(value).__name__}")

    def _encode_tensor(self, value: torch.Tensor) -> object:
        from vlmserve_common.compute.tensors import to_array

        array, dtype = to_array(value.detach().cpu())
        self._kept.append(array)  # for as long as its id stands for it
        return [dtype, *self._encode_array(array)[1:]]

    def _encode_held(self, value: HeldArray) -> object:
        if self._shared is not None and value.nbytes:
            try:
                array, name = self._shared.hold(value.array)
            except OSError as error:
                logger.debug("no room to hold an array in shared memory (%s): it goes with its message", error)
            else:
                value.move(array)
                return [value.dtype.str, list(value.shape), name]
        return self._encode_array(value.array)

    def _encode_array(self, value: np.ndarray) -> list[object]:
        if value.dtype.kind not in _KINDS:
            raise NotImplementedError(f"cannot send an array of {value.dtype}")
        if id(value) in self._places:
            return self._places[id(value)]
        head: list[object] = [value.dtype.str, list(value.shape)]
        self._places[id(value)] = [*head, self._place(value)]
        return self._places[id(value)]

    def _place(self, value: np.ndarray) -> int | str:
        if self._shared is not None and value.nbytes >= SHARED_FROM_BYTES:
            try:
                block = self._shared.put(value)
            except OSError as error:
                logger.warning("no room for a large array in shared memory (%s): it goes with its message", error)
            else:
                self._put.append(block)
                return block
        self._frames.append(np.ascontiguousarray(value).data.cast("B") if value.size else b"")
        return len(self._frames) - 1

    def _decode_value(self, cls: type, value: Any) -> Any:
        if cls is np.ndarray:
            return self._decode_array(*value)
        if cls is HeldArray:
            return self._decode_held(*value)
        if cls.__module__ == "torch" and cls.__name__ == "Tensor":
            return self._decode_tensor(*value)
        raise NotImplementedError(f"cannot receive a {cls.__name__}")

    def _decode_tensor(self, dtype_name: str, shape: list[int], place: int | str) -> torch.Tensor:
        from vlmserve_common.compute.tensors import from_array

        return from_array(self._decode_array(_BITS.get(dtype_name, dtype_name), shape, place), dtype_name)

    def _decode_held(self, dtype_name: str, shape: list[int], place: int | str) -> HeldArray:
        shared = self._shared
        if not isinstance(place, str) or shared is None or shared.is_block_name(place):
            return HeldArray(self._decode_array(dtype_name, shape, place))
        dtype, size = _checked_dtype(dtype_name), tuple(shape)
        return HeldArray.elsewhere(lambda: shared.look_at(place, dtype, size), dtype, size)

    def _decode_array(self, dtype_name: str, shape: list[int], place: int | str) -> np.ndarray:
        dtype = _checked_dtype(dtype_name)
        if place not in self._arrays:
            self._arrays[place] = self._fetch(place, dtype, tuple(shape))
        return self._arrays[place]

    def _fetch(self, place: int | str, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        if isinstance(place, int):
            return np.frombuffer(self._frames[place], dtype=dtype).reshape(shape)
        if self._shared is None:
            raise ValueError("a shared block on a channel without shared memory")
        return self._shared.take(place, dtype, shape)


def _checked_dtype(name: str) -> np.dtype:
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise ValueError(f"refused an array of {dtype}")
    return dtype


class MessageChannel:
    """One end of a two-way channel over a pipe. A message is one pipe message: each wakes a thread of the receiver.

    send_types, receive_types: the dataclasses that may come and go. Large arrays go through shared memory. One thread
    may encode and send while another receives.
    """

    def __init__(
        self,
        send: Callable[[Frame], None],
        receive: Callable[[], bytes],
        *,
        send_types: Iterable[type],
        receive_types: Iterable[type],
        shared: SharedArrays,
    ) -> None:
        self._send = send
        self._receive = receive
        self._encoder, self._decoder = WireCodec(send_types, shared), WireCodec(receive_types, shared)

    def encode(self, message: object) -> list[Frame]:
        """A message's frames, to be sent or discarded. WireError for arrays that cannot travel."""
        return self._encoder.encode(message)

    def send(self, frames: Sequence[Frame]) -> None:
        """Send an encoded message; blocks while the pipe is full. Raises what the pipe raises."""
        self._send(join(frames))

    def discard(self, frames: Sequence[Frame]) -> None:
        """Free the shared memory of an encoded message (its first two frames will do) that was not received."""
        self._encoder.discard(frames)

    def receive(self) -> Any:
        """The next message; blocks. Raises what the pipe raises, and WireError."""
        return self._decoder.decode(split(self._receive()))
