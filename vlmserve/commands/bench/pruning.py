"""`vlmserve bench pruning`: drawn pages without their exact repeats, beside the whole pages, in turns.

It reports the time to the first token, and how far the tower's embeddings of what stays are from those of the whole
page. Pages are paper with lines of letters. No two are alike, so no cache helps. Without --model, times are those of
random weights in the shape of Qwen3-0.6B with the tower of Qwen3-VL-2B, and embeddings those of the built-in model.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont

from processors.families.base import data_item
from processors.families.registry import make_processor
from processors.knobs import ImageKnobs
from processors.processed import ProcessedImage
from vision.towers.loading import load_tower
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import temporal_patches
from vlmserve.commands.bench.checkpoints import write_random_checkpoint
from vlmserve.commands.bench.figures import Spread, bench_parser, in_turns, ratios, write_json
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.model_path import DEFAULT_MODEL, resolve_model
from vlmserve_common.checkpoint.hf_config import read_hf_config

_WORDS = ("invoice", "total", "number", "date", "paid", "street", "amount", "of", "the", "and", "42", "1,280.50")


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, and print its figures."""
    parser = bench_parser("pruning", "Drawn pages without their exact repeats.", rounds=3)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id")
    add("--num-threads", type=int, help="CPU threads of the model (default: all cores)")
    add("--pages", type=int, default=2, help="pages in a round")
    add("--side", type=int, default=768, help="pixels of a page's longer side")
    args = parser.parse_args(argv)
    found = _distances(args.model or str(DEFAULT_MODEL), args)
    with tempfile.TemporaryDirectory() as folder:
        found |= _times(args.model or str(write_random_checkpoint(Path(folder) / "random")), args)
    write_json(args, found)
    return 0


def draw_page(side: int, seed: int) -> bytes:
    """Return a PNG file of a page, `side` pixels high: a heading, some lines of words, and white paper."""
    rng = np.random.default_rng(seed)
    page = Image.new("RGB", (side * 3 // 4, side), "white")
    draw = ImageDraw.Draw(page)
    size = side // 40
    font = ImageFont.load_default(size)
    draw.text((size * 3, size * 2), f"Page {seed}", fill="black", font=ImageFont.load_default(2 * size))
    for line in range(int(rng.integers(8, 16))):
        words = " ".join(rng.choice(_WORDS, int(rng.integers(2, 7))))
        draw.text((size * 3, size * (6 + 2 * line)), words, fill="black", font=font)
    file = io.BytesIO()
    page.save(file, "PNG")
    return file.getvalue()


def _distances(model: str, args: Any) -> dict[str, Any]:
    """Print and return what leaves pages, and how far the embeddings of what stays move."""
    folder = resolve_model(model)
    processor = make_processor(folder, read_hf_config(folder))
    runner = TowerRunner(load_tower(folder, dtype=torch.float32), torch.device("cpu"))
    left, cosines = [], []
    for seed in range(8 * args.pages):
        with Image.open(io.BytesIO(draw_page(args.side, seed))) as page:
            whole, fewer = (processor.process_image(page, ImageKnobs(skip_repeats=skip)) for skip in (False, True))
        left.append(100 * (1 - fewer.num_tokens / whole.num_tokens))
        cosines += _cosines(runner, whole, fewer).tolist()
    shares, likeness = Spread.of(left), np.quantile(cosines, [0.5, 0.05])
    print(f"embeddings of {Path(folder).name}: {shares.shown('.0f', '%')} of the tokens leave a page")
    print(f"cosine of embeddings that stay: median {likeness[0]:.3f}, 5% are below {likeness[1]:.3f}", flush=True)
    return {"left_percent": asdict(shares), "cosine": {"median": likeness[0], "p05": likeness[1]}}


def _cosines(runner: TowerRunner, whole: ProcessedImage, fewer: ProcessedImage) -> torch.Tensor:
    """Return the cosine of each embedding that stays with that of the whole page."""
    rows, some = (runner.encode(temporal_patches(data_item(page)))[0].float() for page in (whole, fewer))
    if fewer.kept:
        rows = rows[torch.from_numpy(np.frombuffer(fewer.kept[0], bool).copy())]
    return torch.nn.functional.cosine_similarity(rows, some, dim=1)


def _times(model: str, args: Any) -> dict[str, Any]:
    """Print and return the ratio of the times to first tokens."""
    seeds = iter(range(10**6))
    left: list[float] = []
    with LLM(model, num_threads=args.num_threads, max_pixels="checkpoint", max_total_tokens=8192) as llm:

        def first_tokens(skip: bool) -> Callable[[], None]:
            def run() -> None:
                for seed in [next(seeds) for _ in range(args.pages)]:
                    content = [
                        {"type": "image", "image": draw_page(args.side, seed), "skip_repeats": skip},
                        {"type": "text", "text": "What is the total?"},
                    ]
                    answer = llm.chat([{"role": "user", "content": content}], temperature=0.0, max_tokens=1)
                    if skip:
                        [page] = answer.mm_report["media"]
                        left.append(100 * page["pruning"]["repeats"] / (page["pruning"]["repeats"] + page["tokens"]))

            return run

        times = in_turns({"whole": first_tokens(False), "without repeats": first_tokens(True)}, args.rounds)
    ratio = ratios(times["whole"].wall, times["without repeats"].wall)
    each, shares = Spread.of(times["whole"].wall, 1 / args.pages), Spread.of(left)
    print(f"{shares.shown('.0f', '%')} of the tokens leave a page of {args.side} pixels")
    print(f"first token of a whole page: {each.shown('.2f', ' s')}; without repeats, so many times as fast: {ratio}")
    return {"seconds": {name: asdict(one) for name, one in times.items()}, "first_token": asdict(ratio)}
