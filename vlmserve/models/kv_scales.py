"""A checkpoint's scales of keys and values, which fit them into a KV cache of 8-bit floats.

Each scale is rounded up to a power of two and becomes part of the model. Keys and values come out divided; queries, and
the product behind attention, are multiplied instead. Powers of two change no digit of a floating-point weight. So with
a cache that rounds nothing answers stay the same, to the bit, and attention need not know. Rounding to a few binary
digits loses as much whatever the power of two, so the exact scale would be no closer.
"""

from __future__ import annotations

import logging
import math
import re

import torch

from vlmserve.models.decoder import Decoder, DecoderAttention, DecoderLayer
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.checkpoint.weights import WeightRules
from vlmserve_common.errors import CheckpointError

log = logging.getLogger(__name__)

# compressed-tensors and vLLM, ModelOpt, older versions of compressed-tensors
_NAME = re.compile(
    r"^language_model\.layers\.(\d+)\.self_attn\.(?:([kv])_scale|[kv]_proj\.([kv])_scale|([kv])_proj\.output_scale)$"
)


class KVScales:
    """The scales of a checkpoint. stored: their published names. CheckpointError for a scale that is no number."""

    def __init__(self, reader: CheckpointReader, rules: WeightRules) -> None:
        self._reader = reader
        self._found = {}
        for name, stored in reader.tensors.items():
            match = _NAME.match(rules.our_name(name))
            if match is not None:
                if math.prod(stored.shape) != 1 or not stored.dtype.is_floating_point:
                    raise CheckpointError(
                        f"{reader.folder}: {name} is {list(stored.shape)} of {stored.dtype}, not one number"
                    )
                kind = match[2] or match[3] or match[4]
                self._found[int(match[1]), kind] = stored
        self.stored = {stored.name for stored in self._found.values()}

    def fold_into(self, decoder: Decoder) -> None:
        """Make them part of a loaded decoder. CheckpointError for layers that it has not, and scales not above 0."""
        layers = decoder.layers
        for (number, kind), stored in self._found.items():
            value = torch.empty(stored.shape, dtype=stored.dtype)
            self._reader.read_into([(stored, value)])
            scale = value.float().item()
            if not (0 < scale < math.inf) or number >= layers.whole:
                raise CheckpointError(
                    f"{self._reader.folder}: {stored.name} is {scale:g}; it must be above 0, and of one of "
                    f"{layers.whole} layers"
                )
            if not 0 <= number - layers.first < len(layers):  # another stage has it
                continue
            power = 2.0 ** math.ceil(math.log2(scale))
            attention = getattr(layers[number - layers.first], "self_attn", None)
            done = isinstance(attention, DecoderAttention) and (
                attention.divide_keys(power) if kind == "k" else attention.divide_values(power)
            )
            if not done:
                why = "a hybrid model's keys and values are not divided"
                if isinstance(layers[0], DecoderLayer):
                    why = "the weights that it belongs to are whole numbers"
                log.warning("%s is not used: %s", stored.name, why)
