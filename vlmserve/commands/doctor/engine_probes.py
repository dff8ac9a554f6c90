"""Probes by the engine's own code: attention on the first GPU, and a checkpoint."""

from __future__ import annotations

import os
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from processors.families.registry import make_processor
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.model_loading import prepare_device
from vlmserve.engine.recurrent import state_bytes
from vlmserve.engine.windows import window_room
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.sizing import check_weights_fit, kv_cache_size, weight_bytes
from vlmserve.models.attention.base import AttentionSpec
from vlmserve.models.attention.choice import FOR_GPUS, try_candidate
from vlmserve.models.registry import outline_model, quantization_of
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.schemes import Scheme
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.memory import free_memory
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError


def examine_attention() -> dict[str, Any]:
    """Try the attention backends on the first GPU, as the server does at its start.

    Returns the device, which is None without a GPU; then nothing is tried. Else returns the versions of packages (None:
    not installed), the C compiler that Triton takes, the fault of each backend (None: it works; best first), the
    backend that --attention-backend auto takes, and the heads of the model of the trial.
    """
    if not torch.cuda.is_available():
        return {"device": None}
    spec = _spec(torch.device("cuda:0"))
    why_not = {candidate.name: try_candidate(candidate, spec).why_not for candidate in FOR_GPUS}
    return {
        "device": str(spec.device),
        "heads": str(spec),
        "compiler": os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang"),
        "versions": {"flashinfer": _version("flashinfer-python"), "triton": _version("triton")},
        "why_not": why_not,
        "backend": next((name for name, why in why_not.items() if why is None), "torch"),
    }


def _spec(device: torch.device) -> AttentionSpec:
    """Return the attention of Qwen3-VL-8B."""
    dtype = torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16
    return AttentionSpec(
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        scaling=128**-0.5,
        dtype=dtype,
        cache_dtype=dtype,
        page_size=16,
        device=device,
    )


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def examine_model(name: str) -> dict[str, Any]:
    """Examine a checkpoint folder without loading it: configuration, presence of all tensors, and memory.

    Returns figures in bytes and tokens; `error` says why it does not fit. Raises CheckpointError.
    """
    folder = Path(name)
    args = EngineArgs(model=name)
    # whether weights of whole numbers stay so depends on what is active
    whole_numbers = isinstance(quantization_of(folder), Scheme)
    device = prepare_device(args, None)[0] if whole_numbers else resolve_device(args.device)
    model = outline_model(folder, device=device)
    tokenizer = load_text_tokenizer(folder)
    load_chat_template(folder)
    make_processor(folder, read_hf_config(folder), continue_text=tokenizer.continue_text)
    config = model.config
    weights = weight_bytes(model)
    per_token = KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, model.dtype)
    facts: dict[str, Any] = {
        "family": config.family,
        "dtype": dtype_name(model.dtype),
        "context": config.context_length,
        "weight_bytes": weights,
        "device": str(device),
        "free_bytes": free_memory(device)[0],
        "kv_bytes_per_token": per_token,
        "kv_tokens": None,
        "state_bytes": (states := state_bytes(args, config, model.dtype, config.context_length)),
        "error": None,
    }
    try:
        check_weights_fit(weights, model=name, dtype=model.dtype, device=device)
        facts["kv_tokens"] = kv_cache_size(
            args,
            bytes_per_token=per_token,
            max_model_len=config.context_length,
            device=device,
            windows=window_room(args, model, config.context_length, model.dtype),
            weights_to_come=weights,
            state_bytes=states,
        )
    except EngineError as error:
        facts["error"] = str(error)
    return facts
