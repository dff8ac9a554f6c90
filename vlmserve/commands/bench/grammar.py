"""`vlmserve bench grammar`: answers that follow a JSON schema beside answers without one, in turns.

Both sides make as many tokens for as many requests. A schema costs a search for the tokens that may come next, and a
mask over the rest. Also, a step is sampled only when the tokens of the last step are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from vlmserve.commands.bench.figures import bench_parser, in_turns, ratios, write_json
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
    """Run the benchmark, and print the ratios."""
    parser = bench_parser("grammar", "Answers that follow a JSON schema beside answers without one.", rounds=5)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id; the built-in model if left out")
    add("--num-threads", type=int, help="CPU threads of the model (default: all cores)")
    add("--requests", type=int, default=16, help="requests at a time")
    add("--tokens", type=int, default=200, help="tokens of each answer")
    args = parser.parse_args(argv)
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
    found = {
        "throughput": ratios(times["any"].wall, times["schema"].wall),
        "cpu_time": ratios(times["schema"].cpu, times["any"].cpu),
    }
    print(f"throughput with a schema, of that without: {found['throughput']}")
    print(f"CPU time with a schema, of that without: {found['cpu_time']}")
    seconds = {name: asdict(timing) for name, timing in times.items()}
    write_json(args, {"seconds": seconds, **{name: asdict(spread) for name, spread in found.items()}})
    return 0
