"""Makes towers by model family, loads a checkpoint's tower without the rest of the model, and identifies it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from processors.hashing import digest_fields
from vision.towers.audio import AudioTower, Qwen2_5AudioTower, Qwen3AudioTower
from vision.towers.blocks import VisionTower
from vision.towers.omni import Qwen2_5OmniVisionTower, Qwen3OmniVisionTower
from vision.towers.qwen2 import Qwen2_5VisionTower, Qwen2VisionTower
from vision.towers.qwen3 import Qwen3VisionTower
from vlmserve_common.checkpoint.hf_config import declared_dtype, has_tower, read_hf_config
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.checkpoint.rewrite import Rewriter
from vlmserve_common.checkpoint.weights import Update, WeightRules, load_weights, match_weights
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.linear import share_workspace
from vlmserve_common.compute.lora import AdapterLayout
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.errors import CheckpointError
from vlmserve_common.kernels.quantized import Mode

TOWERS: Mapping[str, Callable[[dict[str, Any]], VisionTower]] = {
    "qwen2_vl": Qwen2VisionTower,
    "qwen2_5_vl": Qwen2_5VisionTower,
    "qwen3_vl": Qwen3VisionTower,
    "qwen3_vl_moe": Qwen3VisionTower,
    "qwen3_5": Qwen3VisionTower,
    "qwen3_5_moe": Qwen3VisionTower,
    "qwen4_exp": Qwen3VisionTower,
    "qwen2_5_omni": Qwen2_5OmniVisionTower,
    "qwen3_omni_moe": Qwen3OmniVisionTower,
}
EARS: Mapping[str, type[AudioTower]] = {"qwen2_5_omni": Qwen2_5AudioTower, "qwen3_omni_moe": Qwen3AudioTower}

TOWER_WEIGHT_RULES = WeightRules(
    # `visual.*` (Qwen2-VL, Qwen2.5-VL), `model.visual.*` (Qwen3-VL, and all families saved anew) or `thinker.visual.*`
    # (Omni). Ears are a part of the tower here.
    prefixes=tuple(
        (f"{whole}{part}.", ours)
        for whole in ("thinker.model.", "thinker.", "model.", "")
        for part, ours in (("visual", "visual."), ("audio_tower", "visual.ears."))
    ),
    # a constant that old versions of transformers saved along, and an embedding that is not used
    ignored=(r"\brotary_pos_emb\.inv_freq$", r"\baudio_tower\.audio_bos_eos_token\.weight$"),
)
"""Names of a tower's tensors in a whole model's checkpoint."""
OF_THE_TOWER = r"^(thinker\.)?(model\.)?(visual|audio_tower)\."
_NOT_OF_THE_TOWER = r"^(?!(thinker\.)?(model\.)?(visual|audio_tower)\.)"
# To be changed with whatever changes the embeddings that our towers make of the same weights.
_VERSION = b"vlmserve tower 1"


def make_tower(hf_config: Mapping[str, Any], dtype: torch.dtype, device: torch.device | str) -> VisionTower:
    """Make an uninitialised tower for a checkpoint's config.json.

    Raises CheckpointError for a family without a tower here, or an impossible `vision_config`.
    """
    model_type = str(hf_config.get("model_type"))
    if model_type not in TOWERS:
        if not has_tower(hf_config):
            raise CheckpointError(f"no vision tower for model_type {model_type!r}, which reads text only")
        raise CheckpointError(f"no vision tower for model_type {model_type!r}; there are {', '.join(TOWERS)}")
    vision_config = hf_config.get("vision_config")
    if not isinstance(vision_config, dict):
        raise CheckpointError("config.json has no vision_config")
    with torch.device("meta"):
        tower: VisionTower = TOWERS[model_type](vision_config)
        if model_type in EARS:
            tower.ears = EARS[model_type](vision_config["audio_config"])
        tower = tower.to(dtype)
    give_memory(tower.eval(), device)
    share_workspace(tower)
    return tower


def tower_adapters(tower: VisionTower, *, max_rank: int, most: int) -> AdapterStore:
    """Make the store of adapters that may change a tower, which is not packed yet. Modules of the decoder are passed
    over. most: adapters in memory."""
    whole = nn.Module()
    whole.visual = tower
    store = AdapterStore(
        whole,
        AdapterLayout.of(whole, TOWER_WEIGHT_RULES),
        dtype=next(tower.parameters()).dtype,
        max_rank=max_rank,
        most=most,
    )
    tower.adapters = store.active
    return store


def outline_tower(folder: Path, *, dtype: torch.dtype | None = None) -> VisionTower:
    """Make the tower of a checkpoint folder on the meta device: its sizes, without weights or memory.

    `dtype` and errors: as in `load_tower`, which also checks the tensors.
    """
    hf_config = read_hf_config(folder)
    try:
        dtype = dtype or declared_dtype(hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    return make_tower(hf_config, dtype, "meta")


def load_tower(folder: Path, *, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> VisionTower:
    """Make the tower of a checkpoint folder on `device`. Only its tensors are read.

    `dtype`: of its weights and results; the checkpoint's own by default. Raises CheckpointError when the family is
    unknown, the `vision_config` impossible, or one of the tower's tensors missing, unexpected or misshaped.
    """
    reader = CheckpointReader(folder)
    tower = outline_tower(folder, dtype=dtype)
    give_memory(tower, device)
    rules = replace(TOWER_WEIGHT_RULES, ignored=(*TOWER_WEIGHT_RULES.ignored, _NOT_OF_THE_TOWER))
    # under its name in a whole model: only tensors stored under that name belong to it
    load_weights(nn.ModuleDict({"visual": tower}), reader, rules)
    return tower


def rewrite_tower(tower: VisionTower, folder: Path, source: CheckpointReader) -> None:
    """Write tensors in the place of those of a tower that was loaded from a checkpoint folder, and may be packed. Other
    tensors of the source are passed over. They are known to fit. CheckpointError for a file that cannot be read."""
    outline = nn.ModuleDict({"visual": outline_tower(folder, dtype=tower.dtype)})
    rules = replace(TOWER_WEIGHT_RULES, ignored=(*TOWER_WEIGHT_RULES.ignored, _NOT_OF_THE_TOWER))
    dtypes = {rules.our_name(name): stored.dtype for name, stored in source.tensors.items()}
    update = Update(dtypes=dtypes, dtype=tower.dtype, is_part=True)
    matched = match_weights(outline, source, rules, update=update)
    Rewriter(nn.ModuleDict({"visual": tower}), outline).write(matched)


def joined_fingerprint(fingerprints: Sequence[bytes]) -> bytes:
    """Return 32 bytes that identify one tower, or several whose embeddings lie side by side."""
    return digest_fields(fingerprints) if len(fingerprints) > 1 else fingerprints[0]


def tower_fingerprint(tower: VisionTower, vision_config: Mapping[str, Any], mode: Mode | None = None) -> bytes:
    """Return 32 bytes that identify a tower: BLAKE3 over its weights as loaded, in its dtype, and its settings.

    Equal fingerprints and equal pixels give equal embeddings, up to rounding. `vision_config`: as in config.json.
    `mode`: how the weights will be quantised. The tower's device does not matter, nor other loaded modules. All cores
    hash weights in place. Weights on a GPU are copied one tensor at a time.
    """
    return digest_fields(_fields(tower, vision_config, mode), threads=available_cpus())


def _fields(tower: VisionTower, vision_config: Mapping[str, Any], mode: Mode | None) -> Iterator[bytes | memoryview]:
    yield _VERSION
    if mode is not None:
        yield mode.encode()
    yield type(tower).__name__.encode()
    yield json.dumps(vision_config, sort_keys=True, separators=(",", ":")).encode()
    for name, weights in sorted(tower.state_dict().items()):
        yield f"{name} {weights.dtype} {list(weights.shape)}".encode()
        yield weights.cpu().reshape(-1).view(torch.uint8).numpy().data
