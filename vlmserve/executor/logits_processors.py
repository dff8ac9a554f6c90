"""Logits processors: the operator's own classes, named at the start (--logits-processors), which requests call by name.

A request brings plain JSON parameters and never code. A processor keeps nothing between calls: each call has all tokens
of the request. So an answer depends neither on other requests nor on retraction.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np

from vlmserve_common.errors import EngineError

if TYPE_CHECKING:  # the API process, which only checks parameters, does without torch
    import torch

    from vlmserve.executor.model_worker_batch import LogitsProcessing

log = logging.getLogger(__name__)


@runtime_checkable
class LogitsProcessor(Protocol):
    """The interface of a processor, which is made without arguments, once in each process. name: what requests call it;
    by default the name of the class."""

    def check(self, params: Mapping[str, Any]) -> None:
        """Raise ValueError for impossible parameters. The request is refused with its text."""

    def apply(
        self, logits: torch.Tensor, prompt_ids: np.ndarray, output_ids: np.ndarray, params: Mapping[str, Any]
    ) -> torch.Tensor:
        """logits: float32 [vocab], which may be changed in place; ids: int64, so far. Returns logits of that shape."""


class LogitsProcessors:
    """The processors of a process, by name."""

    def __init__(self, processors: Mapping[str, LogitsProcessor]) -> None:
        self._processors = dict(processors)

    @property
    def names(self) -> list[str]:
        """The names that requests may call."""
        return list(self._processors)

    def check(self, name: str, params: Mapping[str, Any]) -> None:
        """Raise ValueError for an unknown processor, or for parameters that it refuses."""
        processor = self._processors.get(name)
        if processor is None:
            known = ", ".join(self._processors) or "none"
            raise ValueError(f"there is no logits processor {name!r}, only: {known} (setting --logits-processors)")
        processor.check(params)

    def apply(
        self, logits: torch.Tensor, calls: Sequence[LogitsProcessing]
    ) -> tuple[torch.Tensor, tuple[tuple[int, str], ...]]:
        """Apply calls to logits float32 [S, vocab], in place. Also return the rows at which a processor failed, and
        why."""
        failures: dict[int, str] = {}
        for call in calls:
            if call.row in failures:
                continue
            try:
                row = self._processors[call.name].apply(logits[call.row], call.prompt_ids, call.output_ids, call.params)
                if row.shape != logits.shape[1:]:
                    raise ValueError(f"it returned logits of shape {tuple(row.shape)}, not {tuple(logits.shape[1:])}")
                if not row.max().isfinite():  # which is NaN if any is
                    raise ValueError("it returned logits that are not numbers, or left no token possible")
                logits[call.row] = row
            except Exception as error:  # the operator's code: it fails the request that called it, and no other
                log.exception("the logits processor %s failed", call.name)
                failures[call.row] = f"the logits processor {call.name!r} failed: {type(error).__name__}"
        return logits, tuple(failures.items())


def load_logits_processors(names: str | None) -> LogitsProcessors:
    """Make processors. names: MODULE:CLASS with commas between them; the modules are imported. EngineError if one
    cannot be made, is no processor, or has the name of another."""
    found: dict[str, LogitsProcessor] = {}
    for place in names.split(",") if names else ():
        module, _, attribute = place.strip().partition(":")
        try:
            made = getattr(importlib.import_module(module), attribute)()
        except Exception as error:
            raise EngineError(f"--logits-processors: cannot make {place!r}: {type(error).__name__}: {error}") from error
        if not isinstance(made, LogitsProcessor):
            raise EngineError(f"--logits-processors: {place!r} lacks `check` or `apply`")
        name = getattr(made, "name", attribute)
        if name in found:
            raise EngineError(f"--logits-processors: two are called {name!r}")
        found[name] = made
    return LogitsProcessors(found)
