"""What an agent reads and writes: the KV cache and the recurrent states of one rank, by slots and heads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from vlmserve.disaggregation.messages import AgentInfo, LayerPart, Source
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.recurrent_cache import RecurrentCache
from vlmserve_common.errors import EngineError
from vlmserve_common.transport.addresses import tcp_url


class KVPool:
    """A rank's KV cache, of which `parts` says what of the model each layer is, and its recurrent states."""

    def __init__(self, kv_cache: KVCache, parts: Sequence[LayerPart], states: RecurrentCache | None = None) -> None:
        assert len(parts) == len(kv_cache.layers), "each layer of the cache is a part of the model's"
        self.parts = tuple(parts)
        self._layers = [  # [num_slots, heads, n], in the cache's own memory
            [
                _words(tensor if tensor.dim() == 3 else tensor.unsqueeze(-1))
                for tensor in (one.keys, one.values, one.key_scales, one.value_scales)
                if tensor is not None
            ]
            for one in kv_cache.layers
        ]
        self._states = () if states is None else states.parts
        self.device = self._layers[0][0].device
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @property
    def state_shape(self) -> str:
        """What a recurrent state consists of here; "" without any."""
        return "; ".join(f"{tuple(one.shape[1:])} {one.dtype}" for one in self._states)

    @property
    def layers(self) -> Sequence[Sequence[torch.Tensor]]:
        """The cache's own memory: of each part its tensors [num_slots, heads, n], in the order of `gather`."""
        return self._layers

    @property
    def states(self) -> Sequence[torch.Tensor]:
        """The memory of recurrent states, [num_states, ...] each, in the order of `gather`."""
        return self._states

    def whole(self) -> np.ndarray:
        """Return cuts int64 [k, 3] (see `Read`) of all that is here."""
        return np.array([(at, 0, part.heads) for at, part in enumerate(self.parts)], dtype=np.int64).reshape(-1, 3)

    def width(self, cuts: np.ndarray) -> int:
        """Return the bytes of one token in these cuts. EngineError for cuts of something else."""
        return sum(sum(piece[0].nbytes for piece in self._pieces(cut)) for cut in cuts)

    @property
    def state_bytes(self) -> int:
        """Bytes of one recurrent state."""
        return sum(one[0].nbytes for one in self._states)

    @torch.inference_mode()
    def gather(self, cuts: np.ndarray, slots: np.ndarray, state: int = -1) -> np.ndarray:
        """Return KV as bytes, uint8: for each cut the keys of all slots int64 [n], then their values, then scales if
        there are any; and then the state, if one is named. EngineError for what is not here."""
        self._check(slots, state)
        with torch.cuda.stream(self._stream):
            at = torch.from_numpy(slots.copy()).to(self.device)
            blocks = [piece.index_select(0, at) for cut in cuts for piece in self._pieces(cut)]
            blocks += [one[state] for one in self._states] if state >= 0 else []
            if not blocks:
                return np.zeros(0, dtype=np.uint8)
            return torch.cat([_bytes(block) for block in blocks]).cpu().numpy()

    @torch.inference_mode()
    def scatter(self, cuts: np.ndarray, slots: np.ndarray, data: torch.Tensor, state: int = -1) -> None:
        """Write what `gather` returned for as many slots and as large cuts, uint8. EngineError if sizes do not fit."""
        self._check(slots, state)
        wanted = self.width(cuts) * len(slots) + (self.state_bytes if state >= 0 else 0)
        if data.nbytes != wanted:
            raise EngineError(f"{data.nbytes} bytes of KV have come, and {wanted} were asked for")
        with torch.cuda.stream(self._stream):
            left = data.to(self.device)
            at = torch.from_numpy(slots.copy()).to(self.device)
            targets = [piece for cut in cuts for piece in self._pieces(cut)]
            for target in targets:
                size = target[0].nbytes * len(slots)
                block, left = left[:size], left[size:]
                target.index_copy_(0, at, _as(block, target).reshape(len(slots), *target.shape[1:]))
            for one in self._states if state >= 0 else ():
                size = one[0].nbytes
                block, left = left[:size], left[size:]
                one[state] = _as(block, one).reshape(one.shape[1:])
            if self._stream is not None:
                self._stream.synchronize()

    def _pieces(self, cut: np.ndarray) -> list[torch.Tensor]:
        layer, first, last = cut.tolist()
        if not (0 <= layer < len(self._layers) and 0 <= first < last <= self.parts[layer].heads):
            raise EngineError(f"heads {first}..{last} of part {layer} were asked for, and are not here")
        return [tensor[:, first:last] for tensor in self._layers[layer]]

    def _check(self, slots: np.ndarray, state: int) -> None:
        count = len(self._layers[0][0])
        if len(slots) and not 0 <= slots.min() <= slots.max() < count:
            raise EngineError(f"slots {slots.min()}..{slots.max()} were asked for, and there are {count}")
        states = len(self._states[0]) if self._states else 0
        if not -1 <= state < states:
            raise EngineError(f"state {state} was asked for, and there are {states}")


def sources(own: AgentInfo, others: Sequence[AgentInfo], host: str) -> tuple[Source, ...]:
    """Decide from which of the other server's agents an own one reads what. host: of agents that name none. EngineError
    if nobody has some heads, or the state cannot be taken over as it is."""
    found: dict[int, list[tuple[tuple[int, int, int], tuple[int, int, int]]]] = {}
    for at, part in enumerate(own.parts):
        head, last = part.first, part.first + part.heads
        while head < last:
            number, other_at, other = _who_has(part.layer, head, others)
            end = min(last, other.first + other.heads)
            theirs = (other_at, head - other.first, end - other.first)
            found.setdefault(number, []).append((theirs, (at, head - part.first, end - part.first)))
            head = end
    state_from = _who_has_state(own, others, list(found)) if own.state else None
    return tuple(
        Source(
            address=tcp_url(others[number].host or host, others[number].port),
            cuts=np.array([theirs for theirs, _ in pairs], dtype=np.int64),
            own_cuts=np.array([ours for _, ours in pairs], dtype=np.int64),
            has_state=number == state_from,
            transport=next(one for one in own.transports if one in others[number].transports),
        )
        for number, pairs in found.items()
    )


def _who_has(layer: int, head: int, others: Sequence[AgentInfo]) -> tuple[int, int, LayerPart]:
    for number, other in enumerate(others):
        for at, part in enumerate(other.parts):
            if part.layer == layer and part.first <= head < part.first + part.heads:
                return number, at, part
    raise EngineError(f"no rank there has key-value head {head} of layer {layer}")


def _who_has_state(own: AgentInfo, others: Sequence[AgentInfo], candidates: Sequence[int]) -> int:
    """States are taken over whole, so the other server must cut layers and heads as this one does."""
    for number in candidates:
        if others[number].state == own.state and others[number].parts == own.parts:
            return number
    raise EngineError("recurrent states are cut otherwise there: --tp-size and --pp-size must be equal for this model")


def _words(tensor: torch.Tensor) -> torch.Tensor:
    """View a tensor as words of 8 bytes, which are copied four times as fast as bytes; as bytes if it has others."""
    fits = tensor.shape[-1] * tensor.itemsize % torch.int64.itemsize == 0
    return tensor.view(torch.int64 if fits else torch.uint8)


def _bytes(block: torch.Tensor) -> torch.Tensor:
    return block.contiguous().view(torch.uint8).flatten()


def _as(block: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    # a view needs an aligned beginning, which earlier blocks of odd sizes may have spoiled
    return (block if block.storage_offset() % like.element_size() == 0 else block.clone()).view(like.dtype)
