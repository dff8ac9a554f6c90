"""A checkpoint examined without loading it: its configuration, that all its tensors are there, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from processors.families.registry import make_processor
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.recurrent import state_bytes
from vlmserve.frontend.chat_template import load_chat_template
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.sizing import check_weights_fit, kv_cache_size, weight_bytes
from vlmserve.models.registry import outline_model
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.compute.memory import free_memory
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError


def examine(name: str) -> dict[str, Any]:
    """name: a checkpoint folder. Figures in bytes and tokens; `error` says why it does not fit. CheckpointError."""
    folder = Path(name)
    args = EngineArgs(model=name)
    device = resolve_device(args.device)
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
        "context": config.max_position_embeddings,
        "weight_bytes": weights,
        "device": str(device),
        "free_bytes": free_memory(device)[0],
        "kv_bytes_per_token": per_token,
        "kv_tokens": None,
        "state_bytes": (states := state_bytes(args, config, model.dtype, config.max_position_embeddings)),
        "error": None,
    }
    try:
        check_weights_fit(weights, model=name, dtype=model.dtype, device=device)
        facts["kv_tokens"] = kv_cache_size(
            args,
            bytes_per_token=per_token,
            max_model_len=config.max_position_embeddings,
            device=device,
            weights_to_come=weights,
            state_bytes=states,
        )
    except EngineError as error:
        facts["error"] = str(error)
    return facts
