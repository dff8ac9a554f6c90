"""What a request may ask for beside its messages: the names of `/set`, `--set` and the flags."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from vlmserve.config.plain_problems import did_you_mean
from vlmserve_common.errors import VlmserveError


class OptionError(VlmserveError):
    """No such option, or a value that it cannot have."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """type: of its values. place: the request itself, or its pictures or videos."""

    type: type[int] | type[float] | type[str]
    help: str
    place: Literal["request", "picture", "video", "both"] = "request"


OPTIONS: Mapping[str, Option] = MappingProxyType(
    {
        "temperature": Option(type=float, help="0 always takes the likeliest token"),
        "top_p": Option(type=float, help="sample among the likeliest tokens of this probability together"),
        "top_k": Option(type=int, help="sample among so many of the likeliest tokens"),
        "min_p": Option(type=float, help="leave out tokens less likely than this part of the likeliest"),
        "max_tokens": Option(type=int, help="longest answer, in tokens"),
        "seed": Option(type=int, help="the same seed gives the same answer"),
        "stop": Option(type=str, help="end the answer before this text"),
        "repetition_penalty": Option(type=float, help="above 1 keeps from repeating"),
        "presence_penalty": Option(type=float, help="above 0 keeps from repeating, however often it was said"),
        "frequency_penalty": Option(type=float, help="above 0 keeps from repeating, the more the oftener"),
        "detail": Option(type=str, place="picture", help="of pictures: auto, low or high"),
        "min_pixels": Option(type=int, place="both", help="least area of a picture or frame, in pixels"),
        "max_pixels": Option(type=int, place="both", help="largest area of a picture or frame, in pixels"),
        "fps": Option(type=float, place="video", help="frames a second taken of a video"),
        "nframes": Option(type=int, place="video", help="frames taken of a video"),
    }
)
"""Which values make sense is the server's to say: it knows the model."""


def option_named(name: str) -> str:
    """The option's proper name. OptionError, with what may have been meant, if there is none."""
    proper = name.lower().replace("-", "_")
    if proper in OPTIONS:
        return proper
    guess = did_you_mean(proper, OPTIONS, f"; there are {', '.join(OPTIONS)}")
    raise OptionError(f"there is no option {name!r}{guess}")


def parse_option(name: str, text: str) -> Any:
    """A value as its option has it. OptionError."""
    kind = OPTIONS[name].type
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        allowed = "a whole number" if kind is int else "a number"
        raise OptionError(f"{name} is {text!r}; it must be {allowed}")
    return value


def parse_assignment(text: str) -> tuple[str, Any]:
    """ "name=value". OptionError."""
    name, sign, value = text.partition("=")
    if not sign:
        raise OptionError(f"{text!r} must be NAME=VALUE")
    name = option_named(name.strip())
    return name, parse_option(name, value.strip())


def of_place(options: Mapping[str, Any], *places: str) -> dict[str, Any]:
    """Those options that belong there."""
    return {name: value for name, value in options.items() if OPTIONS[name].place in places}
