"""The identity of a tower: of equal fingerprints and equal pixels come equal embeddings, up to rounding."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from processors.hashing import digest_fields
from vision.towers.blocks import VisionTower
from vlmserve_common.compute.cpus import available_cpus

# To be changed with whatever changes the embeddings that our towers make of the same weights.
_VERSION = b"vlmserve tower 1"


def tower_fingerprint(tower: VisionTower, vision_config: Mapping[str, Any]) -> bytes:
    """32 bytes: BLAKE3 over a tower's weights as loaded, in its dtype, and its settings.

    vision_config: as in config.json. It does not matter on which device the tower is, or what else was loaded with it.
    Weights are hashed in place by all cores; those on a GPU are copied one tensor at a time.
    """
    return digest_fields(_fields(tower, vision_config), threads=available_cpus())


def _fields(tower: VisionTower, vision_config: Mapping[str, Any]) -> Iterator[bytes | memoryview]:
    yield _VERSION
    yield type(tower).__name__.encode()
    yield json.dumps(vision_config, sort_keys=True, separators=(",", ":")).encode()
    for name, weights in sorted(tower.state_dict().items()):
        yield f"{name} {weights.dtype} {list(weights.shape)}".encode()
        yield weights.cpu().reshape(-1).view(torch.uint8).numpy().data
