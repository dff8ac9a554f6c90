"""`vlmserve plan`: reads config.json, and prints what each GPU would hold and the least times of steps."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from vlmserve.commands.plan.gpus import GPUS
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.model_path import resolve_model
from vlmserve.config.number_words import above_zero, positive
from vlmserve.config.settings import iter_settings, load_settings

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
        "chunked_prefill_size", "disable_cuda_graph", "dtype", "encoder_max_patches", "kv_cache_dtype",
        "mamba_cache_mib", "max_model_len", "max_prefill_tokens", "max_running_requests", "mem_fraction_static",
        "page_size",
    }
)  # fmt: skip


def main(argv: Sequence[str]) -> int:
    """Print a table, or JSON. Raises VlmserveError for what cannot be."""
    args = _parser().parse_args(argv)
    # late, so that --help is quick
    from vlmserve.commands.plan.layout import Layout
    from vlmserve.commands.plan.plan import Asked, make_plan
    from vlmserve.commands.plan.table import as_data, show

    gpu = GPUS[args.gpu]
    given = {
        "memory": (args.gpu_memory_gib, 2**30),
        "bandwidth": (args.bandwidth_gbs, 1e9),
        "flops": (args.tflops, 1e12),
        "fp8_flops": (args.fp8_tflops, 1e12),
        "link": (args.link_gbs, 1e9),
    }
    changed = {name: value * unit for name, (value, unit) in given.items() if value is not None}
    if changed:
        gpu = replace(gpu, name="GPU", **{name: type(getattr(gpu, name))(value) for name, value in changed.items()})
    layout = Layout(tp=args.tp, pp=args.pp, dp=args.dp, ep=args.ep, dp_attention=args.enable_dp_attention)
    with _folder(args.model) as folder:
        asked = Asked(
            args=replace(_engine_args(args), model=str(folder)),
            context=args.context,
            batches=tuple(args.batch),
            prompt=args.prompt,
            reserved=int(args.reserved_gib * 2**30),
        )
        plan = make_plan(folder, layout, gpu, asked)
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


def _engine_args(args: argparse.Namespace) -> EngineArgs:
    names = {setting.name for setting in iter_settings()} & _SETTINGS
    flags = {name: value for name, value in vars(args).items() if name in names}
    return load_settings(flags, config=args.config).engine


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="vlmserve plan", usage="%(prog)s MODEL [options]", description=_ABOUT, epilog=_EPILOG)
    parser.add_argument("model", metavar="MODEL", help="a checkpoint folder, or a config.json")
    parser.add_argument("--json", action="store_true", help="print JSON")
    add = parser.add_argument_group("GPUs that share the model").add_argument
    for name, text in (
        ("tp", "ranks that share each layer"),
        ("pp", "stages, of some layers each"),
        ("dp", "replicas, each on its own --tp times --pp GPUs"),
        ("ep", "groups of the ranks that have whole experts"),
    ):
        add(f"--{name}", f"--{name}-size", type=positive, default=1, metavar="N", help=text)
    text = "--dp divides the --tp ranks: attention is shared by --tp / --dp of them, experts by all"
    add("--enable-dp-attention", action="store_true", help=text)
    add = parser.add_argument_group("a GPU").add_argument
    add("--gpu", choices=sorted(GPUS), default="h200", help="which one [default: h200]")
    for name, kind, text in (
        ("gpu-memory-gib", above_zero, "its memory, instead"),
        ("bandwidth-gbs", above_zero, "GB/s of its memory, instead"),
        ("tflops", above_zero, "TFLOP/s of dense products in 16 bits, instead"),
        ("fp8-tflops", _amount, "TFLOP/s in 8 bits, for FP8 checkpoints, instead; 0: there are none"),
        ("link-gbs", _amount, "GB/s to other GPUs, each way, instead; 0: exchanges are not counted"),
    ):
        add(f"--{name}", type=kind, metavar="X", help=text)
    add("--reserved-gib", type=_amount, default=1.0, metavar="X", help="for CUDA and its libraries [default: 1]")
    add = parser.add_argument_group("requests").add_argument
    add("--context", type=positive, default=8192, metavar="N", help="tokens of each [default: 8192]")
    batches = [1, 8, 64, 256]
    add("--batch", type=positive, nargs="+", default=batches, metavar="N", help="decode together in a replica")
    add("--prompt", type=positive, default=8192, metavar="N", help="tokens of a prompt [default: 8192]")
    add_settings(parser, _SETTINGS)
    return parser


def _amount(word: str) -> float:
    number = float(word)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{word} is no amount")
    return number
