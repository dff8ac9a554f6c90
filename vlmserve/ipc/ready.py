"""What a child process reports once it can work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, kw_only=True)
class ReadyInfo:
    """The engine's measures, as the scheduler found them; the detokenizer reports none.

    max_model_len: prompt and answer of one request together, in tokens. max_total_tokens: KV cache slots.
    """

    max_model_len: int = 0
    max_total_tokens: int = 0


Ready: TypeAlias = Callable[[ReadyInfo], None]
