"""Decides whether a model fits, and how many KV slots do."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch
from torch import nn

from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.compute.memory import free_memory, show_gib
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError

log = logging.getLogger(__name__)

_GIB = 1024**3
_USABLE = 0.95  # of the memory that is left: computing takes some, too
_GRAPHS = 0.1  # of the same, for captured graphs at the most: they save time, KV slots let requests run at all
_EMBEDS = 1 / 32  # of the same, for the embeddings of pictures
_LEAST_EMBEDS, _MOST_EMBEDS = 2**13, 2**18  # rows: Qwen3-VL makes 2**10 of a picture of 1024x1024
_SLOT_BYTES = 4  # of a request's table of KV slots, once on the device and once on the host


@dataclass(frozen=True, kw_only=True)
class Activations:
    """Peak bytes for computing, beside weights and caches: a batch of the vision tower, the layers of a step, and
    sampling behind these. Tower and step take turns, unless they are computed `beside` each other. Three things stay:
    the graphs of captured steps; embeds, the cache of embeddings; and encoders, processes beside on the same GPU."""

    tower: int = 0
    step: int = 0
    logits: int = 0
    graphs: int = 0
    embeds: int = 0
    encoders: int = 0
    beside: bool = False

    @property
    def peak(self) -> int:
        """The bytes that must be left free for computing, and for what stays."""
        step = self.step + self.logits
        return (self.tower + step if self.beside else max(self.tower, step)) + sum(self._kept.values())

    @property
    def _kept(self) -> dict[str, int]:
        return {"CUDA graphs": self.graphs, "embeddings": self.embeds, "encoder processes": self.encoders}

    def __str__(self) -> str:
        parts = f"vision tower {show_gib(self.tower)}, prompt chunk {show_gib(self.step)}"
        parts += f", logits {show_gib(self.logits)}"
        parts += "".join(f", {name} {show_gib(size)}" for name, size in self._kept.items() if size)
        return f"{show_gib(self.peak)} ({parts})"


@dataclass(frozen=True)
class WindowRoom:
    """What layers with windows keep if they have slots of their own: so many tokens of all requests together, of
    bytes_per_token each."""

    tokens: int
    bytes_per_token: int


def kv_bytes(tokens: int, bytes_per_token: int, windows: WindowRoom | None) -> int:
    """Return the bytes of a KV cache of so many tokens. bytes_per_token: of all layers."""
    spared = 0 if windows is None else max(0, tokens - windows.tokens) * windows.bytes_per_token
    return tokens * bytes_per_token - spared


def kv_tokens(nbytes: int, bytes_per_token: int, windows: WindowRoom | None) -> int:
    """Return how many tokens a KV cache of so many bytes has: the inverse of `kv_bytes`."""
    if windows is None or nbytes < windows.tokens * bytes_per_token:
        return nbytes // bytes_per_token
    others = bytes_per_token - windows.bytes_per_token
    return (nbytes - windows.tokens * windows.bytes_per_token) // max(1, others)  # there may be no others


def activation_bytes(rows: int, *, stream: int, widest: int, itemsize: int, beside: int = 0) -> int:
    """Estimate the peak bytes of layers over `rows` tokens or patches.

    stream: width of the residual stream, which exists three times: itself, normalised, and the next one; and three
    times in float32, inside norms and products. widest: elements of the widest layer. beside: bytes a row that stay for
    all layers.
    """
    return rows * (3 * stream * (itemsize + torch.float32.itemsize) + widest * itemsize + beside)


def embeds_bytes(args: EngineArgs, *, row_bytes: int, free: float) -> int:
    """Return the bytes for the cache of embeddings on the model's device: `encoder_cache_mib`, or by default a part of
    what is free beside the weights, within bounds. row_bytes: of one token's embedding, DeepStack's included."""
    if args.encoder_cache_mib is not None:
        return args.encoder_cache_mib * 2**20
    return min(max(int(free * _EMBEDS), _LEAST_EMBEDS * row_bytes), _MOST_EMBEDS * row_bytes)


def weight_bytes(module: nn.Module) -> int:
    """Return the bytes of a module's parameters, also of one on the meta device."""
    return sum(parameter.nbytes for parameter in module.parameters())


def quantised_part(bits: float, dtype: torch.dtype, *, beside: float = 32 / 64) -> float:
    """Return about which part of a plain weight's bytes a quantised one takes. beside: bits a weight for scales and
    zeros, which usually belong to 64 weights each."""
    return (bits + beside) / (8 * dtype.itemsize)


def gpu_kv_bytes(free: float, total: int, *, computing: int, mem_fraction_static: float) -> float:
    """Return the bytes for the KV cache of a GPU that has `free` left beside weights and states. Computing gets the
    rest of the memory, and more if it needs more. Below 0: nothing is left."""
    return min(max(0, free - computing) * _USABLE, free - total * (1 - mem_fraction_static))


def cpu_kv_bytes(args: EngineArgs, left: float) -> float:
    """Return the bytes for the KV cache on a CPU that has `left` beside weights, states and computing."""
    return min(left * min(args.mem_fraction_static, _USABLE), args.cpu_kv_cache_gib * _GIB)


def check_weights_fit(weights: int, *, model: str, dtype: torch.dtype, device: torch.device) -> None:
    """Check the memory before weights are loaded. EngineError if there is not enough for so many bytes."""
    free, _ = free_memory(device)
    if weights > free:
        smaller = ", or --dtype bfloat16" if dtype == torch.float32 else ""
        raise EngineError(
            f"the weights of {model} take {show_gib(weights)} in {dtype_name(dtype)}, and {_free(free, device)}: "
            f"take a smaller model{smaller}"
        )


def kv_cache_size(
    args: EngineArgs,
    *,
    bytes_per_token: int,
    max_model_len: int,
    device: torch.device,
    windows: WindowRoom | None = None,
    weights_to_come: int = 0,
    state_bytes: int = 0,
    activations: Activations = Activations(),
) -> int:
    """Return the number of KV slots, a multiple of the page size. It is `max_total_tokens` if set, otherwise as many as
    memory allows, and never more than `max_running_requests` full contexts. Memory for computing and `state_bytes` for
    recurrent states stay free. bytes_per_token: of all layers; windows: what some of them keep.

    Call it before the weights are loaded, with their bytes, so that an impossible size is known at once; and again when
    they are. EngineError if not even a page fits, or less than was asked for.
    """
    size = args.page_size
    free, total = free_memory(device)
    left = max(0, free - weights_to_come - state_bytes - activations.peak)
    if args.max_total_tokens is not None:
        tokens = args.max_total_tokens // size * size
    else:
        if device.type == "cuda":
            budget = gpu_kv_bytes(
                free - weights_to_come - state_bytes,
                total,
                computing=activations.peak,
                mem_fraction_static=args.mem_fraction_static,
            )
        else:
            budget = cpu_kv_bytes(args, left)
        contexts = args.max_running_requests * (max_model_len + size)
        tokens = min(kv_tokens(max(0, int(budget)), bytes_per_token, windows), contexts) // size * size
        if (
            not weights_to_come
            and device.type != "cuda"
            and budget < args.cpu_kv_cache_gib * _GIB
            and tokens < contexts
        ):
            log.warning(
                "--cpu-kv-cache-gib is %g, and --mem-fraction-static %g of what is free is %s: that is what it gets",
                args.cpu_kv_cache_gib,
                args.mem_fraction_static,
                show_gib(budget),
            )
    taken = [f"the weights take {show_gib(weights_to_come)}"] * bool(weights_to_come)
    if state_bytes:
        which = "--max-running-requests, --mamba-cache-mib"
        if args.speculative_algorithm != "none":
            which += ", --speculative-num-draft-tokens"
        taken.append(f"states take {show_gib(state_bytes)} ({which})")
    taken += [f"computing takes {activations}"] * bool(activations.peak)
    room = ", of which ".join([_free(free, device), *[" and ".join(taken)][: len(taken)]])
    if tokens < 2 * size:
        raise EngineError(
            f"there is room for {tokens} KV slots of {bytes_per_token} bytes, and at least {2 * size} are needed; "
            f"{room} (settings: --mem-fraction-static, --cpu-kv-cache-gib, --max-total-tokens)"
        )
    taken_by_kv = kv_bytes(tokens, bytes_per_token, windows)
    if args.max_total_tokens is not None and taken_by_kv > left * _USABLE:
        most = kv_tokens(int(left * _USABLE), bytes_per_token, windows) // size * size
        raise EngineError(
            f"--max-total-tokens is {args.max_total_tokens}, a KV cache of {show_gib(taken_by_kv)}; "
            f"{room}: {most} slots of {bytes_per_token} bytes fit at the most"
        )
    context = min(max_model_len, tokens) + size
    tables = args.max_running_requests * context * _SLOT_BYTES * (1 if windows is None else 2)
    if tables > left - taken_by_kv:
        raise EngineError(
            f"--max-running-requests is {args.max_running_requests}: the tables of so many requests of up to {context} "
            f"tokens take {show_gib(tables)} beside a KV cache of {show_gib(taken_by_kv)}; {room} "
            "(--max-model-len makes them shorter)"
        )
    return tokens


def graph_room(args: EngineArgs, *, bytes_per_token: int, device: torch.device, activations: Activations) -> int:
    """Return the bytes that captured graphs may take, when weights are loaded and the KV cache is not there yet. They
    get a tenth of the memory that computing leaves, and no more than `max_total_tokens` leave, if that is set."""
    free, _ = free_memory(device)
    left = free - activations.peak
    room = most_for_graphs(left)
    if args.max_total_tokens is not None:
        room = min(room, left - int(args.max_total_tokens * bytes_per_token / _USABLE))
    return max(0, room)


def most_for_graphs(left: float) -> int:
    """Return the part of the bytes left by weights and computing that graphs may take."""
    return max(0, int(left * _GRAPHS))


def host_pool_size(args: EngineArgs, *, bytes_per_token: int, device: torch.device) -> int:
    """Return the host slots of a rank's hierarchical cache, a multiple of the page size; 0 without one. Call it when
    weights are loaded and KV caches are there, at all ranks before one of them takes the memory. EngineError if that
    much is not free for all ranks of this machine, or not even a page fits."""
    if not args.enable_hierarchical_cache or args.disable_radix_cache:
        return 0
    size = int(args.hicache_size_gib * _GIB)
    tokens = size // bytes_per_token // args.page_size * args.page_size - args.page_size  # a dummy page comes on top
    host = torch.device("cpu")
    free, _ = free_memory(host)
    ranks = len(args.own_ranks)
    if tokens < args.page_size or size * ranks > free * _USABLE:
        each = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise EngineError(
            f"--hicache-size-gib is {args.hicache_size_gib:g}{each}, room for {max(0, tokens)} tokens of "
            f"{bytes_per_token} bytes; {_free(free, host)}, and the model is on {device}"
        )
    return tokens


def _free(free: int, device: torch.device) -> str:
    where = f"on {device}" if device.type == "cuda" else "here (limits of a container included)"
    return f"{show_gib(free)} of memory are free {where}"
