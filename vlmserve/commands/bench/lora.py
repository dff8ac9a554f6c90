"""`vlmserve bench lora`: answers of LoRA adapters beside the model's own, in turns.

Two engines of the same model take turns: one takes adapters, the other one does not. The adapters are random and change
every linear of the decoder. Their answers to the same prompts differ, so each answer has the same number of tokens.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

from vlmserve.commands.bench.checkpoints import write_random_checkpoint
from vlmserve.commands.bench.figures import bench_parser, in_turns, ratios, write_json
from vlmserve.commands.offline.llm import LLM
from vlmserve.models.registry import outline_model
from vlmserve.models.vlm import WEIGHT_RULES
from vlmserve_common.compute.lora import AdapterLayout

_STRENGTH = 0.05


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, and print the ratios."""
    parser = bench_parser("lora", "Answers of LoRA adapters beside the model's own.", rounds=3)
    add = parser.add_argument
    add("--model", default="", help="checkpoint folder or hub id; random weights, text like Qwen3-0.6B, if left out")
    add("--num-threads", type=int, help="CPU threads of the model (default: all cores)")
    add("--rank", type=int, default=16, help="rank of the adapters")
    add("--adapters", type=int, default=8, help="adapters, and requests at a time")
    add("--tokens", type=int, default=128, help="tokens of each answer")
    args = parser.parse_args(argv)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = args.model or str(write_random_checkpoint(folder / "random"))
        settings = {"num_threads": args.num_threads, "max_total_tokens": 16384}
        plain = stack.enter_context(LLM(model, **settings))
        takes = stack.enter_context(
            LLM(model, enable_lora=True, max_lora_rank=args.rank, max_loras_per_batch=args.adapters, **settings)
        )
        names = [f"adapter-{number}" for number in range(args.adapters)]
        for number, name in enumerate(names):
            takes.load_lora_adapter(name, write_random_adapter(Path(model), folder / name, rank=args.rank, seed=number))
        mixes: dict[str, list[str | None]] = {
            "no adapter": [None] * args.adapters,
            "one adapter": [names[0]] * args.adapters,
            f"{args.adapters} adapters": [*names],
        }
        found = _compare(plain, takes, mixes, args)
    write_json(args, found)
    return 0


def _compare(plain: LLM, takes: LLM, mixes: dict[str, list[str | None]], args: Any) -> dict[str, Any]:
    prompts = [f"Name what is in picture {number}, and what is beside it." for number in range(args.adapters)]
    options: dict[str, Any] = {"temperature": 0.0, "max_tokens": args.tokens, "ignore_eos": True}
    work = {"without": partial(plain.chat_batch, prompts, **options)}
    work |= {name: partial(takes.chat_batch, prompts, loras=loras, **options) for name, loras in mixes.items()}
    times = in_turns(work, args.rounds)
    tokens = args.adapters * args.tokens
    rates = ", ".join(f"{tokens / wall:.0f}" for wall in times["without"].wall)
    print(f"without --enable-lora, {args.adapters} at a time: {rates} tokens/s", flush=True)
    found: dict[str, Any] = {"without": {"seconds": asdict(times["without"])}}
    for name in mixes:
        ratio = ratios(times["without"].wall, times[name].wall)
        by_cpu = ratios(times["without"].cpu, times[name].cpu)
        print(f"{name}: of those {ratio}; by CPU time {by_cpu}", flush=True)
        found[name] = {"seconds": asdict(times[name]), "ratio": asdict(ratio), "by_cpu": asdict(by_cpu)}
    return found


def write_random_adapter(model: Path, folder: Path, *, rank: int, seed: int = 0) -> Path:
    """Write an adapter for every linear of a model's decoder. Return its folder."""
    folder.mkdir()
    layout = AdapterLayout.of(outline_model(model, device="meta"), WEIGHT_RULES)
    random = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (outputs, inputs) in layout.shapes.items():
        if name.startswith("language_model."):
            key = f"base_model.model.model.{name}"
            tensors[f"{key}.lora_A.weight"] = torch.randn(rank, inputs, generator=random) / inputs**0.5
            tensors[f"{key}.lora_B.weight"] = torch.randn(outputs, rank, generator=random) * (_STRENGTH / inputs**0.5)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": rank, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder
