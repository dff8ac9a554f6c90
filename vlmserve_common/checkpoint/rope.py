"""How positions turn heads, as `rope_parameters` or `rope_scaling` of config.json say it. Imports no torch.

`modeling_rope_utils` of transformers is what every field follows: names, defaults and formulas.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TypeAlias

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies are divided by `factor`."""

    factor: float


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (arXiv:2309.00071): frequencies that turn less than beta_slow times in `original` tokens are divided by
    `factor`, those that turn more than beta_fast times are not, and a ramp lies between. truncate: it begins and ends
    at whole elements."""

    factor: float
    original: int
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1: wavelengths above original / low_freq are multiplied by `factor`, those below original / high_freq are
    not, and a ramp lies between."""

    factor: float
    original: int
    low_freq: float
    high_freq: float


Scaling: TypeAlias = LinearScaling | YarnScaling | Llama3Scaling


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Rotary positions. scaling: of the frequencies of `theta`; None for none. magnitude: cos and sin are multiplied by
    it ("attention factor")."""

    theta: float
    scaling: Scaling | None = None
    magnitude: float = 1.0


def rope_fields(text: Fields) -> Fields:
    """Return the fields of rotary positions, of which transformers reads `rope_scaling` first. CheckpointError if
    layers have their own."""
    rope = text.section("rope_scaling" if text.values.get("rope_scaling") else "rope_parameters")
    nested = [name for name, value in rope.values.items() if isinstance(value, dict)]
    if nested:
        raise CheckpointError(f"{rope.where}: values for kinds of layers ({', '.join(nested)}) are not supported")
    return rope


def read_rope(text: Fields, default_theta: float) -> Rope:
    """Read how positions turn. CheckpointError for impossible values, and for kinds that are not supported."""
    rope = rope_fields(text)
    theta = rope.number("rope_theta", text.number("rope_theta", default_theta))
    if not 1 < theta < math.inf:
        raise CheckpointError(f"{rope.where}: rope_theta is {theta}, and must be above 1")
    kind = _kind(rope)
    if kind not in _SCALED:
        return Rope(theta=theta)
    factor, original = _factor(rope, text, kind), _original(rope, text)
    if kind == "yarn":
        scaling = YarnScaling(
            factor=factor,
            original=original,
            beta_fast=_above_0(rope, "beta_fast", 32),
            beta_slow=_above_0(rope, "beta_slow", 1),
            truncate=rope.flag("truncate", True),
        )
        return Rope(theta=theta, scaling=scaling, magnitude=_magnitude(rope, factor))
    if kind == "llama3":
        low, high = _above_0(rope, "low_freq_factor"), _above_0(rope, "high_freq_factor")
        if high <= low:
            raise CheckpointError(f"{rope.where}: high_freq_factor is {high}, and must be above low_freq_factor, {low}")
        return Rope(theta=theta, scaling=Llama3Scaling(factor=factor, original=original, low_freq=low, high_freq=high))
    return Rope(theta=theta, scaling=LinearScaling(factor=factor))


def context_length(text: Fields) -> int:
    """Return the tokens that a model is made for: `max_position_embeddings`, or what a scaling makes of the length
    before it, if that is more. CheckpointError as `read_rope` raises it.

    Some checkpoints say in the first what the model was trained for (Qwen3's YaRN), others what it is to be used for
    (Qwen3-VL's, whose positions grow more slowly than its tokens).
    """
    most, rope = text.positive("max_position_embeddings"), rope_fields(text)
    kind = _kind(rope)
    return max(most, int(_factor(rope, text, kind) * _original(rope, text))) if kind in _SCALED else most


_SCALED = ("linear", "yarn", "llama3")
# "dynamic" scales what lies behind max_position_embeddings, and no request is longer here
_PLAIN = ("default", "mrope", "dynamic")
_MOST_TOKENS = 2**31 - 1


def _kind(rope: Fields) -> str:
    kind = rope.string("rope_type", rope.string("type", "default"))
    if kind not in (*_PLAIN, *_SCALED):
        raise CheckpointError(
            f"{rope.where}: type {kind!r} is not supported; supported: {', '.join((*_PLAIN, *_SCALED))}"
        )
    return kind


def _factor(rope: Fields, text: Fields, kind: str) -> float:
    """Return what wavelengths are multiplied by. YaRN's may be left to the context lengths."""
    original = _original(rope, text)
    ratio = text.positive("max_position_embeddings") / original if kind == "yarn" else None
    factor = rope.number("factor", ratio)
    if not 1 <= factor <= _MOST_TOKENS / original:
        raise CheckpointError(
            f"{rope.where}: factor is {factor:g}, and must be from 1 to {_MOST_TOKENS // original} (2^31 tokens)"
        )
    return factor


def _original(rope: Fields, text: Fields) -> int:
    """Return the context length before scaling."""
    return rope.positive("original_max_position_embeddings", text.positive("max_position_embeddings"))


def _above_0(rope: Fields, name: str, default: float | None = None) -> float:
    """Return a number above 0, where 0 stands for a default."""
    value = rope.number(name, default) or default or 0
    if not 0 < value < math.inf:
        raise CheckpointError(f"{rope.where}: {name} is {value}, and must be above 0")
    return value


def _magnitude(rope: Fields, factor: float) -> float:
    """Return what YaRN multiplies cos and sin by; `get_mscale` in transformers."""

    def of(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if rope.has("attention_factor"):
        return _above_0(rope, "attention_factor")
    if rope.number("mscale", 0) and rope.number("mscale_all_dim", 0):
        return of(_above_0(rope, "mscale")) / of(_above_0(rope, "mscale_all_dim"))
    return of(1)
