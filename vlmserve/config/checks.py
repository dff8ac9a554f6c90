"""Checks of settings: their types, their ranges, and their combinations."""

from __future__ import annotations

import dataclasses
import numbers
import re
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Literal, get_args, get_origin, get_type_hints

from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag, problem, range_problems
from vlmserve_common.errors import SettingsError

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


def engine_problems(args: EngineArgs) -> list[str]:
    """Return a sentence for each wrong value; empty if all is well. The types must be checked before."""
    problems = range_problems(args)
    devices = args.encoder_devices.split(",") if args.encoder_devices is not None else []
    if len(devices) > 1 and len(devices) != args.num_encoders:
        allowed = f"one device, or {args.encoder_dp_size} as --encoder-dp-size says"
        problems.append(problem(args, "encoder_devices", allowed))
    chunk, page = args.chunked_prefill_size, args.page_size
    if chunk != -1 and (chunk < 1 or (page >= 1 and chunk % page)):
        allowed = f"-1 (whole prompts), or a positive multiple of --page-size, which is {page}"
        by_page = f"a divisor of --chunked-prefill-size, which is {chunk}"
        problems.append(_blame(args, chunked_prefill_size=allowed, page_size=by_page))
    if args.hicache_storage_dir is not None and not args.enable_hierarchical_cache:
        allowed = "left out without --enable-hierarchical-cache, whose prefixes it keeps: it does nothing alone"
        problems.append(problem(args, "hicache_storage_dir", allowed))
    for name in ("tp_size", "pp_size"):
        if getattr(args, name) > 1 and args.hicache_storage_dir is not None:
            problems.append(f"--hicache-storage-dir does not go with {flag(name)} above 1 yet")
    if args.ep_size >= 1 and args.tp_size % args.ep_size:
        problems.append(problem(args, "ep_size", f"a divisor of --tp-size, which is {args.tp_size}"))
    if args.enable_eplb and args.ep_size == 1:
        problems.append("--enable-eplb moves experts between the parties of --ep-size, which is 1; it must be above 1")
    if args.ep_num_redundant_experts and not args.enable_eplb:
        problems.append(problem(args, "ep_num_redundant_experts", "0 without --enable-eplb"))
    if args.nnodes >= 1 and args.world_size % args.nnodes:
        nodes = f"a multiple of --nnodes, which is {args.nnodes}"
        stages = f"--tp-size {args.tp_size} times --pp-size {args.pp_size} is {args.world_size}; it must be {nodes}"
        by_nodes = f"a divisor of --tp-size, which is {args.tp_size}"
        problems.append(_blame(args, tp_size=nodes, nnodes=by_nodes) if args.pp_size == 1 else stages)
    if args.enable_dp_attention and (args.dp_size < 2 or args.tp_size % args.dp_size):
        divides = f"divide --tp-size, which is {args.tp_size}"
        allowed = f"2 or more with --enable-dp-attention, and {divides}"
        by_groups = f"left out, or --dp-size be 2 or more and {divides}"
        problems.append(_blame(args, dp_size=allowed, enable_dp_attention=by_groups))
    if args.enable_dp_attention and args.pp_size > 1:
        problems.append(problem(args, "pp_size", "1 with --enable-dp-attention"))
    if (args.speculative_algorithm in ("eagle3", "draft_model")) != (args.speculative_draft_model_path is not None):
        allowed = "a folder or id with --speculative-algorithm eagle3 or draft_model, and only then"
        problems.append(problem(args, "speculative_draft_model_path", allowed))
    if args.num_replicas > 1 and args.nnodes > 1:
        allowed = "1 where --nnodes is above 1: all replicas are on one machine; for more, start a server on each"
        problems.append(problem(args, "dp_size", allowed))
    if args.node_rank >= args.nnodes:
        problems.append(problem(args, "node_rank", f"below --nnodes, which is {args.nnodes}"))
    if args.nnodes > 1 and not re.fullmatch(r".+:0*[1-9]\d{0,4}", args.dist_init_addr or ""):
        problems.append(problem(args, "dist_init_addr", "HOST:PORT of machine 0 where --nnodes is above 1"))
    problems.extend(_role_problems(args))
    if args.enable_lora:
        problems += [
            f"--enable-lora does not go with {flag(name)} yet"
            for name, is_set in (
                ("enable_dp_attention", args.enable_dp_attention),
                ("enable_eplb", args.enable_eplb),
                ("moe_a2a_backend torch", args.moe_a2a_backend == "torch"),
            )
            if is_set
        ]
        adapters = len((args.lora_paths or "").split(","))
        if adapters > args.max_loaded_loras:
            problems.append(problem(args, "max_loaded_loras", f"{adapters} or more, as many as --lora-paths has"))
    elif args.lora_paths is not None and not args.merge_lora:
        problems.append(problem(args, "lora_paths", "left out without --enable-lora or --merge-lora"))
    if args.enable_lora and not all(folder for _, folder in args.adapters_at_start):
        problems.append(problem(args, "lora_paths", "NAME=FOLDER, with commas between several"))
    if args.merge_lora:
        if args.lora_paths is None or "," in args.lora_paths:
            problems.append(problem(args, "lora_paths", "one folder with --merge-lora"))
        if args.enable_lora or args.num_encoders or args.encoder_urls is not None or args.role != "all":
            problems.append("--merge-lora goes with none of --enable-lora, --role and encoders beside the engine yet")
    if args.max_total_tokens is not None and page >= 1 and 1 <= args.max_total_tokens < 2 * page:
        problems.append(problem(args, "max_total_tokens", f"at least two pages (--page-size is {page})"))
    return problems


def _role_problems(args: EngineArgs) -> list[str]:
    """Return a sentence for each setting that does not go with `--role`."""
    problems = []
    if (args.role == "decode") != (args.prefill_urls is not None):
        problems.append(problem(args, "prefill_urls", "given with --role decode, and only then"))
    if args.role != "encode":
        return problems
    problems += [
        f"--role encode does not go with {flag(name)} above 1: --encoder-dp-size and --encoder-devices spread the work"
        for name in ("tp_size", "pp_size", "dp_size")
        if getattr(args, name) > 1
    ]
    if args.encoder_urls is not None:
        problems.append("--encoder-urls does not go with --role encode: an encoder asks no other one")
    if args.adapters_at_start:
        problems.append("--lora-paths does not go with --role encode: servers name their adapters to encoders")
    if args.load_format == "dummy":
        problems.append("--load-format dummy does not go with --role encode: no other server has the same weights")
    return problems


def _blame(args: EngineArgs, **allowed: str) -> str:
    """Return a sentence about the first of these settings that was set, by the look of it. allowed: see `problem`."""
    changed = [name for name in allowed if getattr(args, name) != getattr(EngineArgs, name)]
    name = changed[0] if changed else next(iter(allowed))
    return problem(args, name, allowed[name])


def type_problems(values: object, show: Callable[[str], str]) -> list[str]:
    """Return a sentence for each field of a dataclass that is not of its type, for values that no parser has made.

    show: a field's name for people. The items of lists and mappings are not checked.
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
    """Raise SettingsError unless every value has its type and range, and the values can be combined."""
    problems = type_problems(args, flag) or engine_problems(args)
    if problems:
        raise SettingsError("\n".join(problems))
