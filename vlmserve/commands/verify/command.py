"""`vlmserve verify`: runs both sides, one after the other, and compares their answers."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from vlmserve.commands.verify.answers import (
    KINDS,
    Case,
    CaseFinding,
    RunSettings,
    Verdict,
    check_reference_can_load,
    check_reference_can_run,
    compare,
    kinds_of,
    made_cases,
    our_answers,
    own_case,
    reference_answers,
)
from vlmserve.config.fields import flag
from vlmserve.config.flags import CommandParser, above_zero, positive
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import iter_settings
from vlmserve.frontend.chat_template import given_source
from vlmserve_common.version import __version__

# Of logprobs. In 16 bits a logit around 20 is itself only exact to 1/16 (bfloat16) or 1/128 (float16).
TOLERANCES = {"float32": 1e-3, "bfloat16": 0.25, "float16": 0.05}
_ABOUT = """\
Compare our answers with those of transformers on the same checkpoint: greedy tokens, logprobs and prompt lengths. Exits
with 1 when they differ.
"""
_EPILOG = """\
In float32 every token must be equal. In 16 bits rounding decides where two tokens are about equally likely; an answer
that parts from the reference's there is reported as a near tie and compared up to there.
"""


def main(argv: Sequence[str]) -> int:
    """Compare all answers, and return 1 if one differs. Raises VlmserveError if a side cannot answer."""
    args = _parser().parse_args(argv)
    check_reference_can_run()
    template = None if args.chat_template is None else given_source(args.chat_template)
    folder = resolve_model(args.model, args.revision)
    check_reference_can_load(folder)
    settings = RunSettings(
        dtype=args.dtype,
        device=args.device,
        max_tokens=args.max_tokens,
        num_threads=args.num_threads,
        chat_template=template,
        parallel={name: getattr(args, name) for name in parallel_sizes() if getattr(args, name) is not None},
    )
    tolerance = TOLERANCES[args.dtype] if args.tolerance is None else args.tolerance
    findings = run(folder, folder, _cases(args, kinds_of(folder)), settings, tolerance)
    _print(args, findings, tolerance)
    if args.json:
        about = {"model": args.model, "dtype": args.dtype, "device": args.device, "versions": _versions()}
        content = about | {"tolerance": tolerance, "findings": [asdict(finding) for finding in findings]}
        args.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    return int(any(finding.verdict is Verdict.DIFFERENT for finding in findings))


def run(
    folder: Path, reference_folder: Path, cases: Sequence[Case], settings: RunSettings, tolerance: float
) -> list[CaseFinding]:
    """Run both sides one after the other, so that only one model is in memory at a time."""
    print(f"vlmserve: {len(cases)} cases, each whole, out of a warm cache and in small chunks ...", file=sys.stderr)
    ours = our_answers(folder, cases, settings)
    print(f"transformers: {len(cases)} cases ...", file=sys.stderr)
    theirs = reference_answers(reference_folder, cases, settings)
    rounded = settings.dtype != "float32"
    return [
        compare(case.name, variant, answers[place], theirs[place], tolerance=tolerance, allow_near_ties=rounded)
        for place, case in enumerate(cases)
        for variant, answers in ours.items()
    ]


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="vlmserve verify", usage="%(prog)s [MODEL] [options]", description=_ABOUT, epilog=_EPILOG
    )
    text = "checkpoint folder, or a Hugging Face hub id; left out: the small built-in model"
    parser.add_argument("model", metavar="MODEL", nargs="?", default="", help=text)
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    text = "chat template in place of the checkpoint's: a file of Jinja, or the Jinja itself"
    parser.add_argument("--chat-template", metavar="TEXT", help=text)
    parser.add_argument("--dtype", choices=list(TOLERANCES), default="float32", help="compute type [default: float32]")
    text = "cpu, cuda, cuda:1 ...; auto takes the first GPU, else the CPU"
    parser.add_argument("--device", default="auto", help=text)
    text = f"which of {','.join(KINDS)} to run [default: all, or none beside own inputs]"
    parser.add_argument("--cases", metavar="KIND,...", type=_kinds, help=text)
    parser.add_argument("--max-tokens", type=positive, default=32, help="longest answer, in tokens [default: 32]")
    for name in ("--picture", "--video"):
        text = "ask about this too; may be repeated"
        parser.add_argument(name, type=_file, action="append", default=[], metavar="FILE", help=text)
    parser.add_argument("--prompt", help="the question about own pictures and videos, or without any")
    default = ", ".join(f"{value:g} in {name}" for name, value in TOLERANCES.items())
    text = f"largest difference of logprobs that is none [default: {default}]"
    parser.add_argument("--tolerance", type=above_zero, help=text)
    parser.add_argument("--num-threads", type=positive, help="CPU threads of both sides [default: all cores]")
    for name, text in parallel_sizes().items():
        parser.add_argument(flag(name), type=positive, help=f"of this engine: {text}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to a file")
    return parser


def parallel_sizes() -> dict[str, str]:
    """Return the settings of how many processes share a model, with their help."""
    group = "several devices"
    return {one.name: one.help for one in iter_settings() if one.group == group and one.name.endswith("_size")}


def _cases(args: argparse.Namespace, kinds: Sequence[str]) -> list[Case]:
    own = bool(args.picture or args.video or args.prompt)
    kinds = args.cases if args.cases is not None else () if own else kinds
    cases = made_cases(kinds)
    return [*cases, own_case(args.picture, args.video, args.prompt)] if own else cases


def _print(args: argparse.Namespace, findings: Sequence[CaseFinding], tolerance: float) -> None:
    print(f"{args.model or 'the built-in model'} in {args.dtype}; {_versions()}; tolerance {tolerance:g}\n")
    width = max(len(finding.case) for finding in findings) + 2
    print(f"{'case':{width}}{'run':14}{'prompt':>8}{'tokens equal':>16}{'logprobs':>11}{'first step':>12}  verdict")
    for finding in findings:
        equal = f"{finding.equal_tokens} of {finding.tokens}"
        print(
            f"{finding.case:{width}}{finding.variant:14}{finding.prompt_tokens:8}{equal:>16}"
            f"{finding.logprob_difference:11.1e}{finding.first_step_difference:12.1e}  {finding.verdict}"
        )
    different = [finding for finding in findings if finding.verdict is Verdict.DIFFERENT]
    print()
    for finding in different:
        print(f"DIFFERENT: {finding.case} ({finding.variant}): {finding.why}")
    ties = sum(finding.verdict is Verdict.NEAR_TIE for finding in findings)
    print(
        f"{len(findings) - len(different)} of {len(findings)} agree with transformers"
        + (f", {ties} of them up to a near tie" if ties else "")
    )


def _versions() -> str:
    import torch
    import transformers

    return f"vlmserve {__version__}, torch {torch.__version__}, transformers {transformers.__version__}"


def _kinds(text: str) -> tuple[str, ...]:
    kinds = tuple(text.split(","))
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(KINDS)}")
    return kinds


def _file(text: str) -> Path:
    path = Path(text).expanduser()
    if not path.is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return path
