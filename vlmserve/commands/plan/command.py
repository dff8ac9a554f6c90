"""`vlmserve plan`: reads config.json, and prints what each GPU would hold and the least times of steps."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vlmserve.commands.plan.gpus import GPUS
from vlmserve.config.flags import CommandParser, above_zero, add_settings, positive
from vlmserve.config.model_path import resolve_model
from vlmserve.config.settings import load_settings

_ABOUT = """\
Tell whether a model fits on GPUs and how fast it can be at the best, from its config.json alone: no weights and no GPU
are needed. MODEL is a checkpoint folder, or a config.json. Weights, KV cache and what computing takes are counted by
the engine's own code. Times are floors, by the GPU's data sheet: nothing is quicker, and what is measured is slower.
The exit status is 1 for what does not fit.
"""
_EPILOG = """\
examples:
  vlmserve plan Qwen3-VL-235B-A22B-Instruct/config.json --tp 8 --ep 8 --gpu h200
  vlmserve plan ./checkpoint --gpu l40s --context 32768 --kv-cache-dtype fp8_e4m3
  vlmserve plan ./checkpoint --tp 2 --gpu-memory-gib 24 --bandwidth-gbs 1008 --tflops 165
"""
_SETTINGS = frozenset(
    {
        "chunked_prefill_size", "disable_cuda_graph", "dp_size", "dtype", "enable_dp_attention", "encoder_max_patches",
        "ep_size", "kv_cache_dtype", "mamba_cache_mib", "max_model_len", "max_prefill_tokens", "max_running_requests",
        "mem_fraction_static", "page_size", "pp_size", "tp_size",
    }
)  # fmt: skip


def _amount(word: str) -> float:
    number = float(word)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is no amount")
    return number


# of a GPU, by the field that each flag sets: its unit there, its type, and its help
_GPU_FLAGS: dict[str, tuple[str, float, Callable[[str], float], str]] = {
    "memory": ("gpu-memory-gib", 2**30, above_zero, "its memory, instead"),
    "bandwidth": ("bandwidth-gbs", 1e9, above_zero, "GB/s of its memory, instead"),
    "flops": ("tflops", 1e12, above_zero, "TFLOP/s of dense products in 16 bits, instead"),
    "fp8_flops": ("fp8-tflops", 1e12, _amount, "TFLOP/s in 8 bits, for FP8 checkpoints, instead; 0: there are none"),
    "link": ("link-gbs", 1e9, _amount, "GB/s to other GPUs, each way, instead; 0: exchanges are not counted"),
}


def main(argv: Sequence[str]) -> int:
    """Print a table, or JSON. Raises VlmserveError for what cannot be."""
    args = _parser().parse_args(argv)
    # late, so that --help is quick
    from vlmserve.commands.plan.plan import make_plan
    from vlmserve.commands.plan.table import as_data, show

    gpu = GPUS[args.gpu]
    given = {field: getattr(args, field) * unit for field, (_, unit, *_) in _GPU_FLAGS.items() if field in args}
    if given:
        gpu = replace(gpu, name="GPU", **given | {"memory": int(given.get("memory", gpu.memory))})
    flags = {name: value for name, value in vars(args).items() if name in _SETTINGS}
    settings = load_settings(flags, config=args.config).engine
    with _folder(args.model) as folder:
        plan = make_plan(
            replace(settings, model=str(folder)),
            gpu,
            context=args.context,
            batches=args.batch,
            prompt=args.prompt,
            reserved=int(args.reserved_gib * 2**30),
        )
    if args.json:
        json.dump(as_data(plan), sys.stdout, indent=2)
        print()
    else:
        print(show(plan))
    return 0


@contextmanager
def _folder(model: str) -> Iterator[Path]:
    """Yield a checkpoint folder, or one that is made of a config.json."""
    path = Path(model).expanduser()
    if not path.is_file():
        yield resolve_model(model, download=False)
        return
    with tempfile.TemporaryDirectory(prefix="vlmserve-plan-") as made:
        shutil.copyfile(path, Path(made) / "config.json")
        yield Path(made)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="vlmserve plan", usage="%(prog)s MODEL [options]", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a config.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add = parser.add_argument_group("a GPU").add_argument
    add("--gpu", choices=sorted(GPUS), default="h200", help="which one [default: h200]")
    for field, (name, _, kind, text) in _GPU_FLAGS.items():
        add(f"--{name}", dest=field, default=argparse.SUPPRESS, type=kind, metavar="X", help=text)
    add("--reserved-gib", type=_amount, default=1.0, metavar="X", help="for CUDA and its libraries [default: 1]")
    add = parser.add_argument_group("requests").add_argument
    add("--context", type=positive, default=8192, metavar="N", help="tokens of each [default: 8192]")
    batches = [1, 8, 64, 256]
    add("--batch", type=positive, nargs="+", default=batches, metavar="N", help="decode together in a replica")
    add("--prompt", type=positive, default=8192, metavar="N", help="tokens of a prompt [default: 8192]")
    add_settings(parser, _SETTINGS, help_all=False)
    return parser
