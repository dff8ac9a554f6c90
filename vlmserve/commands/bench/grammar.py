"""`vlmserve bench grammar`: answers that follow a JSON schema beside answers that may be anything, in turns.

Both sides make as many tokens for as many requests. What the schema costs is finding the tokens that may come next,
masking the others, and that a step is sampled only when the tokens of the one before are known.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vlmserve.commands.bench.interleaved import in_turns, ratios
from vlmserve.commands.offline.llm import LLM

_ITEM = {
    "type": "object",
    "properties": {
        "label": {"type": "string", "maxLength": 40},
        "color": {"enum": ["red", "green", "blue", "black", "white"]},
        "box": {"type": "array", "items": {"type": "integer", "maximum": 999}, "minItems": 4, "maxItems": 4},
        "sure": {"type": "boolean"},
    },
    "required": ["label", "color", "box", "sure"],
}
# Longer than any answer, so that both sides make the same number of tokens.
_SCHEMA = {"type": "array", "items": _ITEM, "minItems": 10_000}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark; prints the ratio, and with --json writes all figures."""
    args = _parser().parse_args(argv)
    prompts = [f"What is in picture {number}?" for number in range(args.requests)]
    settings: dict[str, Any] = {"max_running_requests": args.requests}
    with LLM(args.model, num_threads=args.num_threads, **settings) as llm:

        def ask(**form: Any) -> None:
            answers = llm.chat_batch(prompts, temperature=0.0, max_tokens=args.tokens, ignore_eos=True, **form)
            assert all(len(answer.token_ids) == args.tokens for answer in answers)

        times = in_turns({"any": ask, "schema": lambda: ask(structured_outputs={"json": _SCHEMA})}, args.rounds)
    tokens = args.requests * args.tokens
    for name, timing in times.items():
        print(f"{name:8} {', '.join(f'{tokens / wall:.0f}' for wall in timing.wall)} tokens/s")
    throughput = ratios(times["any"].wall, times["schema"].wall)
    cpu_time = ratios(times["schema"].cpu, times["any"].cpu)
    print(f"throughput with a schema, of that without: {throughput}")
    print(f"CPU time with a schema, of that without: {cpu_time}")
    if args.json:
        figures = {"settings": vars(args), "seconds": {name: asdict(timing) for name, timing in times.items()}}
        found = {"throughput": asdict(throughput), "cpu_time": asdict(cpu_time)}
        Path(args.json).write_text(json.dumps({**figures, **found}, indent=2) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vlmserve bench grammar",
        description="Answers that follow a JSON schema beside answers that may be anything.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--model", default="", help="checkpoint folder or hub id; default: the built-in model")
    parser.add_argument("--num-threads", type=int, help="of the model on a CPU; default: all cores")
    parser.add_argument("--requests", type=int, default=16, help="at a time")
    parser.add_argument("--tokens", type=int, default=200, help="of each answer")
    parser.add_argument("--rounds", type=int, default=5, help="of both sides in turn")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a file")
    return parser
