"""`vlmserve plan`: reads config.json, and prints what each GPU would hold and the least times of steps. For a CPU, and
without a model, it prints a line for each model."""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from vlmserve.commands.plan.gpus import GPUS, Gpu
from vlmserve.config.flags import CommandParser, above_zero, add_settings, positive
from vlmserve.config.model_path import NotDownloadedError, resolve_model
from vlmserve.config.settings import load_settings
from vlmserve_common.errors import CheckpointError, EngineError
from vlmserve_common.installing import hf

_ABOUT = """\
Tell whether a model fits and how fast it can be at the best, from its config.json alone: no weights and no GPU are
needed. MODEL is a checkpoint folder, or a config.json; without it: each published model, on this machine's CPU or on
--gpu. Weights, KV cache and what computing takes are counted by the engine's own code. Times are floors, by the GPU's
data sheet, or by what is measured of this CPU in about a second: nothing is quicker. The exit status is 1 for a MODEL
that does not fit.
"""
_EPILOG = """\
examples:
  vlmserve plan                                      which published models fit on this machine's CPU, and how fast
  vlmserve plan ./checkpoint --gpu cpu --quantization int4
  vlmserve plan Qwen3-VL-235B-A22B-Instruct/config.json --tp 8 --ep 8 --gpu h200
  vlmserve plan Qwen/Qwen3-VL-235B-A22B-Instruct --tp 8 --ep 8 --server-link-gbit-s 400   prefill and decode apart
  vlmserve plan ./checkpoint --gpu l40s --context 32768 --kv-cache-dtype fp8_e4m3
  vlmserve plan ./checkpoint --tp 2 --gpu-memory-gib 24 --bandwidth-gbs 1008 --tflops 165
"""
_SETTINGS = frozenset(
    {
        "chunked_prefill_size", "cpu_kv_cache_gib", "disable_cuda_graph", "dp_size", "dtype", "enable_dp_attention",
        "encoder_cache_mib", "encoder_max_patches", "ep_size", "kv_cache_dtype", "mamba_cache_mib", "max_model_len",
        "max_prefill_tokens",
        "max_running_requests", "mem_fraction_static", "page_size", "pp_size", "quantization", "revision",
        "tp_size",
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
    from vlmserve.commands.plan.plan import Plan, make_plan
    from vlmserve.commands.plan.published import PUBLISHED, write_config
    from vlmserve.commands.plan.table import as_data, overview, show

    flags = {name: value for name, value in vars(args).items() if name in _SETTINGS}
    settings = load_settings(flags, config=args.config).engine
    gpu = _gpu(args)

    def plan_of(folder: Path) -> Plan:
        return make_plan(
            replace(settings, model=str(folder)),
            gpu,
            context=args.context,
            batches=[1, *args.batch] if args.model is None or gpu.is_cpu else args.batch,
            prompt=args.prompt,
            reserved=0 if gpu.is_cpu else int(args.reserved_gib * 2**30),
            server_link=args.server_link_gbit_s * 1.25e8,
        )

    with tempfile.TemporaryDirectory(prefix="vlmserve-plan-") as made:
        folder = Path(made)
        if args.model is not None:
            plan = plan_of(_folder(args.model, settings.revision, folder))
            data, text = as_data(plan), overview(gpu, {args.model: plan}) if gpu.is_cpu else show(plan)
        else:
            plans: dict[str, Plan | EngineError] = {}
            for shape in PUBLISHED:
                try:
                    plans[shape.hub_id] = plan_of(write_config(shape, folder))
                except EngineError as error:
                    plans[shape.hub_id] = error
            data, text = {name: as_data(one) for name, one in plans.items()}, overview(gpu, plans)
    print(json.dumps(data, indent=2) if args.json else text)
    return 0


def _gpu(args: argparse.Namespace) -> Gpu:
    given = {field: getattr(args, field) * unit for field, (_, unit, *_) in _GPU_FLAGS.items() if field in args}
    name = args.gpu or ("cpu" if args.model is None else "h200")
    if name != "cpu":
        gpu = GPUS[name]
    elif {"memory", "bandwidth", "flops"} <= given.keys():
        gpu = Gpu(name="CPU", memory=0, bandwidth=0, flops=0, is_cpu=True)
    else:
        from vlmserve.commands.plan.machine import this_cpu

        gpu = this_cpu()
    if given:
        kind = "CPU" if gpu.is_cpu else "GPU"
        gpu = replace(gpu, name=kind, **given | {"memory": int(given.get("memory", gpu.memory))})
    return gpu


def _folder(model: str, revision: str | None, made: Path) -> Path:
    """Return a checkpoint folder, or `made` with a config.json: a copy of the one that `model` names, or that of a
    published model."""
    path = Path(model).expanduser()
    if path.is_file():
        shutil.copyfile(path, made / "config.json")
        return made
    try:
        return resolve_model(model, revision, download=False)
    except NotDownloadedError as error:
        from vlmserve.commands.plan.published import PUBLISHED, write_config

        for shape in PUBLISHED:
            if shape.hub_id == model and revision is None:
                return write_config(shape, made)
        words = f"{model} config.json" + f" --revision {revision}" * (revision is not None)
        raise CheckpointError(f"{error}; its config.json is enough: {hf()} download {words}") from None


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(prog="vlmserve plan", usage="%(prog)s [MODEL] [options]", description=_ABOUT, epilog=_EPILOG)
    text = "a checkpoint folder, or a config.json; left out: each published model"
    parser.add_argument("model", metavar="MODEL", nargs="?", help=text)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add = parser.add_argument_group("a GPU").add_argument
    text = "which one; cpu: this machine's CPU, which is measured [default: h200; without MODEL: cpu]"
    add("--gpu", choices=["cpu", *sorted(GPUS)], help=text)
    for field, (name, _, kind, text) in _GPU_FLAGS.items():
        add(f"--{name}", dest=field, default=argparse.SUPPRESS, type=kind, metavar="X", help=text)
    add("--reserved-gib", type=_amount, default=1.0, metavar="X", help="for CUDA and its libraries [default: 1]")
    text = (
        "Gbit/s between two servers: tell what --role prefill, decode and encode send each other [default: 0, nothing]"
    )
    add = parser.add_argument_group("servers of different roles").add_argument
    add("--server-link-gbit-s", type=_amount, default=0.0, metavar="X", help=text)
    add = parser.add_argument_group("requests").add_argument
    text = "[default: 8192, or the most that the model takes]"
    add("--context", type=positive, metavar="N", help=f"tokens of each {text}")
    batches = [1, 8, 64, 256]
    add("--batch", type=positive, nargs="+", default=batches, metavar="N", help="decode together in a replica")
    add("--prompt", type=positive, metavar="N", help=f"tokens of a prompt {text}")
    add_settings(parser, _SETTINGS, help_all=False)
    return parser
