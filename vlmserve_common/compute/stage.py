"""Which layers of a model a process has, where others have those before and behind: pipeline parallelism (GPipe,
arXiv:1811.06965). What comes of a stage's last layer is sent to the next stage; nothing comes back.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from vlmserve_common.errors import EngineError


class Link(Protocol):
    """From a stage to the next one. What one sends the other receives, in the same order."""

    def send(self, x: torch.Tensor) -> None:
        """At the stage before; returns at once, and x is not to be changed any more."""
        ...

    def receive(self, x: torch.Tensor) -> torch.Tensor:
        """At the next stage: what was sent, in x's memory; waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Stage:
    """Stage number `rank` of `size`. before, behind: links from the stage before and to the next; None: there is none,
    or nothing is computed (of a configuration that is only looked at)."""

    rank: int = 0
    size: int = 1
    before: Link | None = None
    behind: Link | None = None

    @property
    def is_first(self) -> bool:
        """Whether it begins with the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether it ends with the final norm and the head."""
        return self.rank == self.size - 1

    def layers(self, count: int, head: float = 0.0) -> range:
        """Which of `count` layers it has: as many as others, or one more among the first stages. head: how many layers
        what the last stage has behind its own is worth; it has fewer for that. EngineError for more stages than
        layers."""
        if count < self.size:
            raise EngineError(f"--pp-size is {self.size}: num_hidden_layers is {count}, too few for so many stages")
        fair = (count + head) / self.size - head
        last = max(1, min(count // self.size, math.ceil(fair - 0.5)))
        if self.is_last:
            return range(count - last if self.size > 1 else 0, count)
        each, more = divmod(count - last, self.size - 1)
        first = self.rank * each + min(self.rank, more)
        return range(first, first + each + (self.rank < more))


ALL_LAYERS = Stage()
