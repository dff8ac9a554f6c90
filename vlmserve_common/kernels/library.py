"""The operators' library of this process: loaded at most once, by the composition root."""

from __future__ import annotations

import ctypes
import functools
import logging
from typing import Literal

import torch

from vlmserve_common.kernels.build import CannotBuild, best_level, cache_folder, cpu_words, library

log = logging.getLogger(__name__)

Choice = Literal["auto", "off"]
_active: ctypes.CDLL | None = None


def activate(choice: Choice, *, threads: int, watch_us: int = 50) -> str:
    """Use the operators in this process from now on; "off": torch's operators. Returns a text for people.

    threads: how many compute a call. Between calls they spin for `watch_us` microseconds, then sleep.
    """
    global _active
    _active = None
    if choice == "off":
        return "torch's operators (--cpu-kernels off)"
    words = cpu_words()
    try:
        level = best_level(words)
        lib, remark = load(level)
        if level == "amx" and not lib.vs_amx():
            level = best_level(words - {"amx_tile"})
            lib, _ = load(level)
            remark = "without AMX, which the system does not give or which does not compute as it should"
    except CannotBuild as error:
        return f"torch's operators, which are slower: {error}"
    lib.vs_configure(threads, watch_us)
    _active = lib
    return f"operators for {level}{f'; {remark}' if remark else ''}"


def active() -> ctypes.CDLL | None:
    """The library, if this process uses it."""
    return _active


def operators() -> ctypes.CDLL:
    """Return the library, which this process must use."""
    assert _active is not None
    return _active


def multiplies_bytes() -> bool:
    """Whether this process multiplies whole numbers of 8 bits, and sooner than bfloat16 (see `cpp/bytes.h`)."""
    return _active is not None and bool(_active.vs_multiplies_bytes())


def torch_threads(threads: int, dtype: torch.dtype) -> int:
    """Return how many of `threads` torch should use beside the library for a model of this dtype.

    One if the library computes: little is left to torch, and a step of several torch threads is as slow as the busiest
    core.
    """
    return threads if _active is None or dtype == torch.float16 else 1


def pointer(tensor: torch.Tensor | None) -> int | None:
    """Return a tensor's address for the library; null for None."""
    return None if tensor is None else tensor.data_ptr()


@functools.cache
def load(level: str) -> tuple[ctypes.CDLL, str]:
    """Load the library of a level, once in a process. Returns it and a remark as `build.library` does. CannotBuild."""
    file, loaded, remark = library(level, cache_folder())
    with loaded:
        try:
            lib = ctypes.CDLL(str(file))
            _declare(lib)
        except (OSError, AttributeError) as error:  # AttributeError: a library without one of the functions
            raise CannotBuild(f"{file} cannot be loaded: {error}") from None
    return lib, remark


def _declare(lib: ctypes.CDLL) -> None:
    """Declare the functions. Letters: p pointer, i int64, n int32, f float32; the result's letter follows ">"."""
    kinds = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "n": ctypes.c_int32, "f": ctypes.c_float}
    for name, letters in SIGNATURES.items():
        function = getattr(lib, name)
        parameters, _, returned = letters.partition(">")
        function.argtypes = [kinds[letter] for letter in parameters]
        function.restype = kinds[returned] if returned else None


SIGNATURES = {
    "vs_configure": "nn",
    "vs_threads": ">n",
    "vs_pack_bf16": "pipip",
    "vs_pack_f32": "pipip",
    "vs_pack_quantised": "npippipip",
    "vs_quantise": "npiiinnnppp",
    "vs_linear": "nnnpiiipiiinppnnppi",
    "vs_lora": "npiiippiip",
    "vs_amx": ">n",
    "vs_multiplies_bytes": ">n",
    "vs_argmax": "piip",
    "vs_rms_norm": "nppiifp",
    "vs_layer_norm": "npppiifp",
    "vs_stream_norm": "nppiiifp",
    "vs_stream_mix": "nppiiip",
    "vs_stream_add": "npppiiip",
    "vs_stream_read": "npiiipfpppppp",
    "vs_delta_step": "p",
    "vs_segment_memory": "niii>i",
    "vs_segment_pack": "npppiipipii",
    "vs_segment_attend": "npppiipipiip",
    "vs_neighbours": "piiiiiiip",
    "vs_qkv": "nnnpiiiippfppppppp",
    "vs_attention": "nnpipppppiiifpipii",
    "vs_route": "npiiipp",
    "vs_experts": "nppiinpippppp",
    "vs_shared_mlp": "nppppppinpipp",
    "vs_decoder_layers": "ppiipp>i",
    "vs_all_reduce": "ppinpp>i",
    "vs_broadcast": "ppin>i",
    "vs_gather": "ppip>i",
    "vs_leave": "p",
}
