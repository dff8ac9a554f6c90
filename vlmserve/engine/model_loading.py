"""Prepares the device of a process, checks that the model fits, and loads the process's part of it."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vlmserve.config.engine_args import AUTO, EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.engine.activation_memory import encoder_bytes, estimate_activations, step_limits
from vlmserve.engine.encoder import SMALLEST_PIXELS, encoder_devices
from vlmserve.engine.recurrent import check_supported, state_bytes
from vlmserve.engine.windows import window_room
from vlmserve.memory.kv_cache import KVCache, cache_dtype
from vlmserve.memory.sizing import check_weights_fit, kv_cache_size, quantised_part, weight_bytes
from vlmserve.models.eagle import has_own_embedding, load_eagle_head, read_eagle_config
from vlmserve.models.random_weights import random_model
from vlmserve.models.registry import adapter_layouts, load_draft_model, load_model, outline_model
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.checkpoint.adapter_file import read_adapter
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.cpus import cpu_name, usable_threads
from vlmserve_common.compute.devices import check_dtype, resolve_device
from vlmserve_common.compute.lora import merge
from vlmserve_common.compute.shard import Shard
from vlmserve_common.compute.tensors import dtype_setting
from vlmserve_common.errors import CheckpointError, EngineError
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate, active, multiplies_bytes, torch_threads
from vlmserve_common.kernels.quantized import MODE_BITS, Mode

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks

log = logging.getLogger(__name__)


def prepare_device(args: EngineArgs, ranks: Ranks | None) -> tuple[torch.device, int]:
    """Return the device, made ready for this thread, and the number of threads that compute on a CPU."""
    threads = usable_threads(args.num_threads, "--num-threads")
    torch.set_num_threads(threads)
    device = resolve_device(args.device)
    if device.type == "cpu":
        operators = activate(args.cpu_kernels, threads=threads)
        log.info("%s: %d threads, which sleep when there is nothing to do; %s", cpu_name(), threads, operators)
        if ranks is not None:
            ranks.share_memory()
    else:
        torch.cuda.set_device(device)  # for this thread: Triton launches there, in its trial, too
    operators = fused.activate(args.gpu_kernels, device)
    if device.type == "cuda":
        log.info("%s: %s", device, operators)
    return device, threads


def load(
    args: EngineArgs, device: torch.device, comm: Communicator, threads: int, *, with_tower: bool
) -> VisionLanguageModel:
    """Load and pack this process's part of the model, once it is known to fit. with_tower: False where encoder
    processes have the tower. Errors: those of `load_model`, and EngineError for too little memory."""
    mode = _quantization(args, device)
    _check_sizes(args, device, mode, comm.shard)
    dtype = dtype_setting(args.dtype)
    make = random_model if args.load_format == "dummy" else load_model
    model = make(Path(args.model), device, dtype, with_tower=with_tower, comm=comm, **for_heads(args))
    attach_guessing(args, model, device)
    if args.merged_adapter is not None:
        merge_adapter(args, args.merged_adapter, model)
    model.pack(mode)
    if device.type == "cpu":
        torch.set_num_threads(torch_threads(threads, model.dtype))
    return model


def merge_adapter(args: EngineArgs, folder: Path, model: VisionLanguageModel) -> None:
    """Add an adapter to the weights, which are as stored. Raises CheckpointError, and EngineError for quantised
    weights."""
    file = read_adapter(folder, max_rank=args.max_lora_rank)
    own, whole = adapter_layouts(Path(args.model), model, without_weights=args.load_format == "dummy")
    left_out = whole.check(file, partly=args.lora_partial)
    if left_out:
        log.warning("%s: left out of the merged adapter: %s", folder, ", ".join(left_out))
    merge(own.place(file, model, dtype=torch.float32, plain=True), model)
    log.info("merged the adapter in %s into the weights", folder)


def bytes_per_token(model: VisionLanguageModel, kv_dtype: torch.dtype) -> int:
    """Return the bytes of one token's keys and values in all layers here."""
    config = model.config
    own = KVCache.bytes_per_token(config.num_kv_layers, config.num_kv_heads, config.head_dim, kv_dtype)
    return own + sum(shape.nbytes(kv_dtype) for shape in model.further_kv)


def _quantization(args: EngineArgs, device: torch.device) -> Mode | None:
    """Return how --quantization packs weights here; None if it does not. EngineError on a GPU."""
    if args.quantization == "none":
        return None
    if device.type != "cpu":
        raise EngineError(f"--quantization {args.quantization} is for CPUs, and the model is on {device}")
    if active() is None:
        log.warning("--quantization %s needs our own operators: the weights stay as they are", args.quantization)
        return None
    if args.quantization == "w8a8" and not multiplies_bytes():
        log.warning(
            "--quantization w8a8 computes as int8 here, with activations and the vision tower as they are: products of "
            "8 bits need AVX512-VNNI, and are not for CPUs with AMX"
        )
        return "int8"
    return args.quantization


def _check_sizes(args: EngineArgs, device: torch.device, mode: Mode | None, shard: Shard) -> None:
    """Check the memory before any weight is read. EngineError says what does not fit."""
    outline = _outline(args, device, shard)
    max_model_len = args.max_model_len or outline.config.context_length
    check_dtype(outline.dtype, device)
    weights = _weights_here(args, device, outline, mode)
    check_weights_fit(weights, model=args.model, dtype=outline.dtype, device=device)
    # on a CPU the size of pictures is found out later; this is the least that it can be
    auto_pixels = SMALLEST_PIXELS if args.max_pixels == AUTO and device.type == "cpu" else None
    limits = step_limits(args, device, max_model_len=max_model_len, auto_pixels=auto_pixels)
    beside = encoder_bytes(args, device, outline.towers, outline.dtype, shard)
    kv_dtype = cache_dtype(args.kv_cache_dtype, outline.dtype)
    tokens = kv_cache_size(
        args,
        bytes_per_token=bytes_per_token(outline, kv_dtype),
        max_model_len=max_model_len,
        device=device,
        windows=window_room(args, outline, max_model_len, kv_dtype),
        weights_to_come=weights,
        state_bytes=state_bytes(args, outline.config, outline.dtype, max_model_len),
        activations=replace(estimate_activations(outline, limits.of_all_groups(args)), encoders=beside),
    )
    longest = min(max_model_len, tokens - args.page_size)
    if args.speculative_algorithm != "none" and args.most_drafts >= longest:
        raise EngineError(
            f"--speculative-num-draft-tokens is {args.most_drafts}, and must be below {longest}, the "
            "tokens of the longest request (--max-model-len, --max-total-tokens)"
        )


def _outline(args: EngineArgs, device: torch.device, shard: Shard) -> VisionLanguageModel:
    dtype, heads = dtype_setting(args.dtype), for_heads(args)
    if args.load_format == "dummy":
        outline = random_model(Path(args.model), "meta", dtype, comm=Communicator(shard), **heads)
    else:
        outline = outline_model(Path(args.model), dtype, device, shard=shard, **heads)
    check_supported(args, outline.config)
    attach_guessing(args, outline, "meta")
    return outline


def for_heads(args: EngineArgs) -> dict[str, Any]:
    """Return what a head that guesses needs of the model: parameters of `load_model`."""
    path = args.speculative_draft_model_path if args.speculative_algorithm == "eagle3" else None
    return {
        "mtp": args.speculative_algorithm == "mtp",
        "embeds_last": path is not None and not has_own_embedding(resolve_model(path)),
    }


def attach_guessing(args: EngineArgs, model: VisionLanguageModel, device: torch.device | str) -> None:
    """Load what guesses tokens from a folder of its own, if anything does; on the meta device, its outline. In a
    pipeline, the first stage has a smaller model, as tokens and pictures begin there, and the last one has a head, as
    hidden states end there. Raises CheckpointError."""
    if args.speculative_draft_model_path is None:
        return
    folder, stage = resolve_model(args.speculative_draft_model_path), model.comm.shard.stage
    if args.speculative_algorithm == "draft_model":
        if not stage.is_first:
            return
        if device == "meta":  # once: the outline comes first
            _check_same_tokens(folder, Path(args.model))
        model.attach_draft(load_draft_model(folder, model.config, device, model.dtype))
    else:
        config, head = read_eagle_config(folder, model.whole_config, args.model), None
        if stage.is_last:
            behind = model.config.num_kv_layers + model.config.num_index_layers
            head = load_eagle_head(folder, config, first_layer=behind, device=device, dtype=model.dtype)
        model.attach_eagle(config, head)


def _check_same_tokens(folder: Path, target: Path) -> None:
    """CheckpointError unless two checkpoints have the same tokens, as far as both have any."""
    own, theirs = (load_text_tokenizer(one) for one in (folder, target))
    for index in range(min(own.num_ids, theirs.num_ids)):
        if own.token_bytes(index) != theirs.token_bytes(index):
            raise CheckpointError(
                f"{folder} cannot guess for {target}: its token {index} is {own.token_bytes(index)!r}, there it is "
                f"{theirs.token_bytes(index)!r}"
            )


def _weights_here(args: EngineArgs, device: torch.device, outline: VisionLanguageModel, mode: Mode | None) -> int:
    """Return the bytes of the weights that this process will hold, packed copies included."""
    weights, shard = weight_bytes(outline), outline.config.shard
    if args.num_encoders:
        encoder_devices(args, device)  # raises if one of them is missing
    if args.num_encoders or not shard.is_entry:
        # encoder processes or the first rank load the towers
        weights -= sum(weight_bytes(tower) for tower in outline.towers)
    embedding = outline.language_model.embed_tokens
    if active() is not None and outline.lm_head is None and embedding is not None and shard.stage.is_last:
        # the packed copy of the embedding that is a tied model's head
        copy = weight_bytes(embedding)
        weights += copy if mode is None else int(copy * quantised_part(MODE_BITS[mode], outline.dtype))
    return weights
