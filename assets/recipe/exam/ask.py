"""Examine a served model: `python -m assets.recipe.exam.ask --base-url http://127.0.0.1:8000/v1 --count 500`."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any, cast

from openai import OpenAI

from assets.recipe.exam.items import Message
from assets.recipe.exam.questions import LEVELS, make_questions
from assets.recipe.exam.report import Ask, Outcome, examine

MOST_TOKENS = 64


def asker(base_url: str, model: str | None = None, body: dict[str, Any] | None = None) -> Ask:
    """Asks the chat completions API at `base_url`, greedily; `model` is the first that the server lists by default.

    `body`: more fields of each request. The environment variable OPENAI_API_KEY has the key, for servers that want one.
    """
    client = OpenAI(base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    name = model or client.models.list().data[0].id

    def ask(messages: list[Message]) -> str:
        reply = client.chat.completions.create(
            model=name, messages=cast(Any, messages), temperature=0, max_tokens=MOST_TOKENS, extra_body=body
        )
        return reply.choices[0].message.content or ""

    return ask


def main(arguments: list[str] | None = None) -> int:
    """Run the exam, print its report and write it where asked; 1 if the accuracy is below `--at-least`."""
    options = _parser().parse_args(arguments)
    questions = make_questions(options.level, options.count, options.seed)
    report = examine(questions, asker(options.base_url, options.model, options.body), options.concurrency)
    for outcome in report.wrong[: options.show_wrong]:
        print(_shown(outcome))
    print(report)
    if options.out:
        exam = {"level": options.level, "count": options.count, "seed": options.seed}
        options.out.write_text(json.dumps({"exam": exam, **report.as_dict()}, indent=1) + "\n")
    if report.overall.accuracy < options.at_least:
        print(f"accuracy {report.overall.accuracy:.1%} is below --at-least {options.at_least:.1%}", file=sys.stderr)
        return 1
    return 0


def _shown(outcome: Outcome) -> str:
    plain = outcome.as_dict()
    asked = " / ".join(text for turn in [*plain["earlier"], [plain["question"]]] for text in turn)
    width, height = plain["size"]
    return (
        f"{plain['kind']} ({width}x{height} {plain['format']}: {', '.join(plain['things'])})\n"
        f"  asked: {asked}\n  right: {plain['right']}\n  got:   {plain['got']}\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m assets.recipe.exam.ask", description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1", help="of the OpenAI-compatible API")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--body", type=json.loads, metavar="JSON", help="more fields of each request")
    parser.add_argument("--level", choices=LEVELS, default="v1", help="v3: texts and boxes; v4: clips")
    parser.add_argument("--count", type=_positive, default=500, help="questions")
    parser.add_argument("--seed", type=int, default=1, help="settles scenes and questions")
    parser.add_argument("--concurrency", type=_positive, default=8, help="questions under way at once")
    parser.add_argument("--show-wrong", type=int, default=0, metavar="N", help="print that many wrong answers")
    parser.add_argument("--at-least", type=float, default=0.0, metavar="SHARE", help="exit 1 below this accuracy, 0..1")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the report as JSON")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is less than 1")
    return value


if __name__ == "__main__":
    sys.exit(main())
