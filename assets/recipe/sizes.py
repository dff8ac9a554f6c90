"""How pictures are cut, which the lessons and the published checkpoint must agree on."""

from __future__ import annotations

PATCH, TEMPORAL_PATCH, MERGE = 16, 2, 2
MIN_PIXELS, MAX_PIXELS = 192 * 192, 224 * 224
"""Pictures are brought to this area: 36 to 49 tokens. Small ones are enlarged, as a patch is 16 pixels."""
VIDEO_MIN_PIXELS, VIDEO_MAX_PIXELS = 4 * 96 * 96, 16 * 128 * 128
"""Pixels of all frames of a video together."""
CONTEXT = 4096
