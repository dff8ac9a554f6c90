"""Where tensors are that replace weights, as data that crosses processes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPlace:
    """A whole tensor of a checkpoint, under its published name, and where its bytes are. dtype: as torch calls it.
    start: in the file. A tensor that is still to be sent is nowhere."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str = ""
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightSource:
    """New weights. folder: a checkpoint with all of them. file: a safetensors file with some of them. tensors: some of
    them. group: sends these one by one, in their order. called: their name in errors."""

    called: str
    folder: str | None = None
    file: str | None = None
    tensors: tuple[TensorPlace, ...] = ()
    group: str | None = None
