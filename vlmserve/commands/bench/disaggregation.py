"""`vlmserve bench disaggregation`: a prefill server and a decode server beside one server that does both.

Each server has half of the cores, so no server takes processor time from the other. They share the machine's memory
and its clock rate, though: prompts at a third server show what that alone costs. All rounds take turns.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import httpx2
import numpy as np

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, ratios, show_and_write
from vlmserve.commands.bench.load import LoadClient
from vlmserve.commands.bench.media import Question
from vlmserve.commands.bench.processes import children_of
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.config.flags import positive

_ABOUT = """\
Two questions. Does an answer stay as quick while another server computes prompts? How much later is the first token of
a prompt whose KV has to travel? The model is random (text like Qwen3-0.6B), unless one is named.
"""
_WORDS = ("a", "red", "circle", "is", "left", "of", "two", "small", "squares", "and", "under", "the", "number")
_STEADY, _LATER = 1.15, 1.10


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and print its figures."""
    parser = bench_parser("disaggregation", _ABOUT)
    add = parser.add_argument
    add("--model", help="checkpoint folder, or random weights if left out")
    add("--rounds", type=positive, default=3, metavar="N", help="rounds of all that is compared")
    add("--prompt-tokens", type=positive, default=4000, metavar="N", help="tokens of a long prompt, about")
    add("--output-tokens", type=positive, default=96, metavar="N", help="tokens of the answer that is watched")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as folder:
        model = Path(args.model) if args.model else _random_model(Path(folder) / "model")
        measures = _measure(args, str(model))
    show_and_write(args, {"a server for prompts and one for answers": measures})
    return 0


def _random_model(folder: Path) -> Path:
    from vlmserve.commands.bench.checkpoints import write_random_checkpoint  # needs torch

    print("writing a random checkpoint ...", file=sys.stderr)
    return write_random_checkpoint(folder)


def _measure(args: argparse.Namespace, model: str) -> list[Measure]:
    cores = sorted(os.sched_getaffinity(0))
    halves = cores[: max(1, len(cores) // 2)], cores[len(cores) // 2 :]
    with ExitStack() as stack:

        def client(half: Sequence[int], *words: str) -> LoadClient:
            server = stack.enter_context(_server(model, half, *words))
            return stack.enter_context(closing(LoadClient(server.base_url, model="bench", proxies=False)))

        prefill = client(halves[0], "--role", "prefill", "--prefill-listen", "127.0.0.1:0")
        (url,) = httpx2.get(f"{prefill.url.removesuffix('/v1')}/server_info", trust_env=False).json()["urls"]
        apart = client(halves[1], "--role", "decode", "--prefill-urls", url)
        alone = client(halves[0])
        dice = random.Random(0)
        for one in (apart, alone):
            one.run([_question(dice, 64)], 4)
        still, beside, beside_stranger, beside_alone, first, first_alone = ([] for _ in range(6))
        for number in range(args.rounds):
            print(f"round {number + 1} of {args.rounds} ...", file=sys.stderr)
            still.append(_gaps_p95(apart, args, dice))
            beside.append(_gaps_p95(apart, args, dice, flooded=apart))
            beside_stranger.append(_gaps_p95(apart, args, dice, flooded=alone))
            beside_alone.append(_gaps_p95(alone, args, dice, flooded=alone))
            first.append(apart.run([_question(dice, args.prompt_tokens)], 1).answers[0].ttft_s)
            first_alone.append(alone.run([_question(dice, args.prompt_tokens)], 1).answers[0].ttft_s)
    beside_prompts, handed_over = ratios(beside, still), ratios(first, first_alone)
    return [
        Measure(name="between tokens (p95) beside prompts", spread=beside_prompts, target=_STEADY, bound="at most"),
        Measure(name="the same, the prompts sent to a third server", spread=ratios(beside_stranger, still)),
        Measure(name="the same on one server", spread=ratios(beside_alone, still)),
        Measure(name="first token, KV handed over", spread=handed_over, target=_LATER, bound="at most"),
        Measure(name="first token on one server", spread=Spread.of(first_alone), unit="s"),
    ]


def _server(model: str, cores: Sequence[int], *words: str) -> OwnServer:
    """Start a server whose processes have these cores, and as many threads."""
    common = ["--served-model-name", "bench", "--log-level", "warning", "--num-threads", str(len(cores))]
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)  # children inherit it
    try:
        server = OwnServer([model, *common, *words], startup_timeout_s=600.0)
    finally:
        os.sched_setaffinity(0, before)
    assert children_of(server.pid), "a server has processes"
    return server


def _question(dice: random.Random, tokens: int) -> Question:
    return Question(pictures=(), text=" ".join(dice.choices(_WORDS, k=max(1, tokens - 16))))


def _gaps_p95(
    client: LoadClient, args: argparse.Namespace, dice: random.Random, *, flooded: LoadClient | None = None
) -> float:
    """Return the 95th percentile of the seconds between an answer's tokens. flooded: who is sent prompts meanwhile, one
    after the other."""
    over = threading.Event()
    prompts = [_question(dice, args.prompt_tokens // 4) for _ in range(256)]

    def flood(url: str) -> None:
        with closing(LoadClient(url, model="bench", proxies=False)) as other:
            for prompt in prompts:
                if over.is_set():
                    return
                other.run([prompt], 1)

    flooding = None if flooded is None else threading.Thread(target=flood, args=[flooded.url])
    if flooding is not None:
        flooding.start()
    gaps = client.run([_question(dice, 32)], args.output_tokens).answers[0].gaps_s
    over.set()
    if flooding is not None:
        flooding.join()
    return float(np.percentile(gaps, 95))
