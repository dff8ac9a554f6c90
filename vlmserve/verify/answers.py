"""What both sides say about a case."""

from __future__ import annotations

from dataclasses import dataclass

TOP = 20
"""Alternatives kept of each step, on both sides."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One output token. logprob: its own. top: the TOP most likely tokens and their logprobs, best first."""

    token_id: int
    logprob: float
    top: dict[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """One greedy answer. prompt_tokens: with all pad tokens. cached_tokens: of the prompt, taken from the prefix cache.

    steps: one for each token, the one that ends the answer included.
    """

    prompt_tokens: int
    steps: tuple[Step, ...]
    cached_tokens: int = 0
