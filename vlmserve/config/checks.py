"""Which engine settings go together: the ranges and relations that types cannot express."""

from __future__ import annotations

import dataclasses
import math
import numbers
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.errors import VlmserveError

MOST_SECONDS = 2_000_000
"""Of a setting that is waited for, 23 days: the system's calls take milliseconds in 32 bits."""


class SettingsError(VlmserveError):
    """One or more settings are wrong; the message has one line for each, naming setting, value and what is allowed."""


_AT_LEAST_ONE = (
    "page_size",
    "max_running_requests",
    "max_prefill_tokens",
    "max_queued_requests",
    "max_mm_workers",
    "max_queued_media",
    "max_video_frames",
    "low_detail_tokens",
)
_AT_LEAST_ONE_IF_SET = (
    "max_pixels",
    "encoder_max_patches",
    "encoder_threads",
    "max_model_len",
    "max_total_tokens",
    "num_threads",
)


_TAKEN_AS: Mapping[type, type] = {int: numbers.Integral, float: numbers.Real}
_IN_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    tuple: "a list",
    dict: "a dict",
    type(None): "None",
}


def flag(name: str) -> str:
    """The command line's name of a setting: ``page_size`` -> ``--page-size``."""
    return "--" + name.replace("_", "-")


def engine_problems(args: EngineArgs) -> list[str]:
    """What is wrong with the values, one sentence each; empty when all is well. Types are taken as checked."""
    problems = []

    def refuse(name: str, allowed: str) -> None:
        problems.append(f"{flag(name)} is {getattr(args, name)!r}; it must be {allowed}")

    for name in _AT_LEAST_ONE:
        if getattr(args, name) < 1:
            refuse(name, "1 or more")
    for name in _AT_LEAST_ONE_IF_SET:
        value = getattr(args, name)
        if value is not None and value < 1:
            refuse(name, "1 or more, or left out")
    if not 0 < args.mem_fraction_static <= 1:
        refuse("mem_fraction_static", "above 0 and at most 1")
    for name in ("cpu_kv_cache_gib", "embedding_cache_gib"):
        if not 0 < getattr(args, name) < math.inf:
            refuse(name, "above 0, and finite")
    if not args.schedule_conservativeness > 0:
        refuse("schedule_conservativeness", "above 0")
    if args.video_fps is not None and not 0 < args.video_fps < math.inf:
        refuse("video_fps", "above 0, or left out")
    if args.media_processes < 0:
        refuse("media_processes", "0 (threads do the work) or more")
    if args.encoder_dp_size < 0:
        refuse("encoder_dp_size", "0 (none beside the engine) or more")
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", args.device):
        refuse("device", "auto, cpu, cuda (a GPU) or cuda:N")
    devices = args.encoder_devices.split(",") if args.encoder_devices is not None else []
    if len(devices) > 1 and len(devices) != args.num_encoders:
        refuse("encoder_devices", f"one device, or {args.encoder_dp_size} as --encoder-dp-size says")
    if any(not re.fullmatch(r"cpu|cuda(:\d+)?", device) for device in devices):
        refuse("encoder_devices", "cpu, cuda or cuda:N, with commas between them")
    if args.encoder_timeout_s is not None and not 0 < args.encoder_timeout_s <= MOST_SECONDS:
        refuse("encoder_timeout_s", f"above 0 and at most {MOST_SECONDS}, or left out")
    for name in ("encoder_cache_mib", "encoder_host_cache_mib", "processor_cache_mib"):
        if getattr(args, name) < 0:
            refuse(name, "0 (no cache) or more")
    if not 0 <= args.random_seed < 2**63:
        refuse("random_seed", "between 0 and 2**63 - 1")
    chunk, page = args.chunked_prefill_size, args.page_size
    if chunk != -1 and chunk < 1:
        refuse("chunked_prefill_size", "-1 (whole prompts), or a positive multiple of --page-size")
    elif chunk > 0 and page >= 1 and chunk % page:
        refuse("chunked_prefill_size", f"-1 (whole prompts), or a multiple of --page-size, which is {page}")
    if args.max_total_tokens is not None and page >= 1 and 1 <= args.max_total_tokens < 2 * page:
        refuse("max_total_tokens", f"at least two pages (--page-size is {page})")
    return problems


def type_problems(values: object, show: Callable[[str], str]) -> list[str]:
    """Which fields of a dataclass are not of their types, one sentence each: for values that no parser has made.

    show: a field's name for people. Of lists and mappings only that they are such is looked at.
    """
    problems = []
    hints = get_type_hints(type(values))
    for field in dataclasses.fields(values):  # type: ignore[arg-type]
        value, kind = getattr(values, field.name), hints[field.name]
        if get_origin(kind) is Literal:
            good, allowed = value in get_args(kind), f"one of {', '.join(get_args(kind))}"
        else:
            union = get_origin(kind) is UnionType
            kinds = [get_origin(one) or one for one in (get_args(kind) if union else (kind,))]
            good = isinstance(value, tuple(_TAKEN_AS.get(one, one) for one in kinds))
            good = good and (not isinstance(value, bool) or bool in kinds)
            allowed = " or ".join(_IN_WORDS.get(one, one.__name__) for one in kinds)
        if not good:
            problems.append(f"{show(field.name)} is {value!r}; it must be {allowed}")
    return problems


def check_engine_args(args: EngineArgs) -> None:
    """Raise SettingsError unless every value is of its type and in range, and they go together."""
    problems = type_problems(args, flag) or engine_problems(args)
    if problems:
        raise SettingsError("\n".join(problems))
