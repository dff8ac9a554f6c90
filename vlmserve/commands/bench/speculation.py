"""`vlmserve bench speculation`: answers with guessed tokens beside the same answers without, in turns.

Two engines of the same model take turns. `free` are answers without a form. Those of random weights soon repeat
themselves, as answers do that copy their prompt. `json` are answers that follow a JSON schema with six fields.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

from vlmserve.commands.bench.checkpoints import write_random_checkpoint
from vlmserve.commands.bench.figures import bench_parser, in_turns, ratios, write_json
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.engine_args import EngineArgs

_FIELDS = ("main_subject", "background_objects", "dominant_colour", "estimated_lighting", "camera_distance", "mood")
_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 12} for name in _FIELDS},
    "required": list(_FIELDS),
    "additionalProperties": False,
}
_FORMS: dict[str, dict[str, Any]] = {"free": {"ignore_eos": True}, "json": {"structured_outputs": {"json": _SCHEMA}}}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, and print the ratios."""
    parser = bench_parser("speculation", "Answers with guessed tokens beside the same answers without.", rounds=3)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id; random weights, text like Qwen3-0.6B, if left out")
    algorithms = get_args(get_type_hints(EngineArgs)["speculative_algorithm"])
    add("--algorithm", default="ngram", choices=algorithms, help="as --speculative-algorithm")
    add("--draft-model-path", help="as --speculative-draft-model-path")
    add("--num-draft-tokens", default="auto", help="as --speculative-num-draft-tokens")
    add("--num-threads", type=int, help="CPU threads of the model (default: all cores)")
    add("--requests", type=int, nargs="+", default=[1, 8], help="requests at a time")
    add("--tokens", type=int, default=128, help="tokens of each answer, at most")
    add("--forms", nargs="+", choices=list(_FORMS), default=list(_FORMS), help="forms of answers")
    args = parser.parse_args(argv)
    drafts = args.num_draft_tokens
    on = {
        "speculative_algorithm": args.algorithm,
        "speculative_draft_model_path": args.draft_model_path,
        "speculative_num_draft_tokens": int(drafts) if drafts.isdecimal() else drafts,
    }
    found: dict[str, Any] = {}
    with ExitStack() as stack:
        model = args.model or str(
            write_random_checkpoint(Path(stack.enter_context(tempfile.TemporaryDirectory())) / "random")
        )
        sides = {
            name: stack.enter_context(LLM(model, num_threads=args.num_threads, max_total_tokens=16384, **settings))
            for name, settings in {"off": {"speculative_num_draft_tokens": 0}, "on": on}.items()
        }
        for form in args.forms:
            for requests in args.requests:
                found[f"{form}, {requests} at a time"] = _compare(sides, form, requests, args)
    write_json(args, found)
    return 0


def _compare(sides: dict[str, LLM], form: str, requests: int, args: Any) -> dict[str, Any]:
    prompts = [f"Name what is in picture {number}, and what is beside it." for number in range(requests)]
    answers: dict[str, list[tuple[int, ...]]] = {}

    def ask(name: str) -> None:
        made = sides[name].chat_batch(prompts, temperature=0.0, max_tokens=args.tokens, **_FORMS[form])
        answers[name] = [tuple(answer.token_ids) for answer in made]

    before = sides["on"].stats().steps.guesses
    times = in_turns({name: partial(ask, name) for name in sides}, args.rounds)
    guesses = sides["on"].stats().steps.guesses.plus(before, -1)
    same = sum(one == other for one, other in zip(answers["off"], answers["on"], strict=True))
    ratio = ratios(times["off"].wall, times["on"].wall)
    tokens = sum(map(len, answers["on"]))
    rates = ", ".join(f"{tokens / wall:.0f}" for wall in times["on"].wall)
    print(
        f"{form}, {requests} at a time: {rates} tokens/s; of those without guesses: {ratio}; "
        f"{guesses}; {same} of {requests} answers equal",
        flush=True,
    )
    seconds = {name: asdict(timing) for name, timing in times.items()}
    figures = {**asdict(guesses), "accept_length": guesses.accept_length}
    return {"seconds": seconds, "ratio": asdict(ratio), "guesses": figures, "equal": same}
