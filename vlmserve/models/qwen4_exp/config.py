"""What config.json says of Qwen4Exp's own parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.errors import CheckpointError

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_LAYER_STEP = 10007


@dataclass(frozen=True, kw_only=True)
class StreamsConfig:
    """Residual streams. rank: of the product that mixes them into the input of a block."""

    count: int
    rank: int


@dataclass(frozen=True, kw_only=True)
class IndexConfig:
    """The index of sparse attention: a token attends to the best `budget` / `block` complete blocks of `block` tokens
    each, and to the tokens behind the last complete one. heads, head_dim: of the index's queries; it has one key."""

    heads: int
    head_dim: int
    budget: int
    block: int

    @property
    def most(self) -> int:
        """The most tokens that a token attends to. Up to so many, attention is causal attention."""
        return self.budget + self.block - 1


@dataclass(frozen=True, kw_only=True)
class NGramConfig:
    """Embedding tables of n-grams, for n from 2 to `size`, in front of the layers `layers`, ascending.

    heads: tables of each n, side by side in one tensor. width: elements of all rows of a token. conv_width: inputs of
    the convolution behind, which lie `size` tokens apart. end_id: ends documents: n-grams do not reach over it. base,
    divisor, seed, vocab_size: tables and hashes follow from them, unless the checkpoint has its own. parts: tensors
    that a table is stored as.
    """

    layers: tuple[int, ...]
    size: int
    heads: int
    width: int
    conv_width: int
    end_id: int
    base: int
    divisor: int
    seed: int
    vocab_size: int
    parts: int

    @property
    def all_heads(self) -> int:
        """The tables of all n together."""
        return (self.size - 1) * self.heads

    @property
    def conv_inputs(self) -> int:
        """Inputs of the convolution that a request keeps."""
        return (self.conv_width - 1) * self.size

    def of_layers(self, own: range) -> NGramConfig:
        """Return the configuration of a stage, with layers counted from its first one."""
        return replace(self, layers=tuple(i - own.start for i in self.layers if i in own))

    def hashes(self, index: int) -> NGramHashes:
        """Return the hashes of n-gram layer number `index` of the whole model, as transformers makes them
        (`Qwen4ExpTextNGramEmbedding`)."""
        sizes = _primes(self.base, (index + 1) * self.all_heads)[index * self.all_heads :]
        bound = max(1, ((1 << 63) - 1) // self.vocab_size // 2)
        start = self.seed + _LAYER_STEP * index
        return NGramHashes(
            multipliers=tuple(2 * (_splitmix64(start + _GAMMA * (i + 1)) % bound) + 1 for i in range(self.size)),
            sizes=tuple(sizes),
            offsets=tuple(sum(sizes[:i]) for i in range(len(sizes))),
        )

    def rows(self, index: int) -> int:
        """Return the rows of the table of n-gram layer number `index`, rows that only fill it up included."""
        return -(-sum(self.hashes(index).sizes) // self.divisor) * self.divisor


@dataclass(frozen=True, kw_only=True)
class NGramHashes:
    """The hashes of one layer: `multipliers` of a token and those before it; of each head, how many rows it has, and
    the first one of them."""

    multipliers: tuple[int, ...]
    sizes: tuple[int, ...]
    offsets: tuple[int, ...]


def read_streams(text: Fields) -> StreamsConfig:
    """Read the residual streams. CheckpointError for fewer than two."""
    count = text.positive("hc_count", 4)
    if count < 2:
        raise CheckpointError(f"{text.where}: hc_count is {count}, and must be 2 or more")
    return StreamsConfig(count=count, rank=text.positive("hc_lowrank", 320))


def read_index(text: Fields, rotary_dim: int) -> IndexConfig:
    """Read sparse attention. rotary_dim: elements of a head that turn. CheckpointError for impossible values."""
    index = IndexConfig(
        heads=text.positive("indexer_n_heads"),
        head_dim=text.positive("indexer_head_dim"),
        budget=text.positive("indexer_budget"),
        block=text.positive("indexer_compress_ratio"),
    )
    text.allow("indexer_kv_heads", text.positive("indexer_kv_heads", 1), (1,))
    if index.budget % index.block:
        raise CheckpointError(
            f"{text.where}: indexer_budget {index.budget} is no multiple of indexer_compress_ratio {index.block}"
        )
    if rotary_dim > index.head_dim:
        raise CheckpointError(
            f"{text.where}: {rotary_dim} elements of a head turn, and indexer_head_dim is {index.head_dim}"
        )
    return index


def read_ngrams(text: Fields, recurrent: frozenset[int]) -> NGramConfig | None:
    """Read the n-gram tables; None without any. recurrent: the layers that have states. CheckpointError for impossible
    values."""
    numbers = sorted(set(text.integers("ple_layer_ids", ())))
    if not numbers:
        return None
    layers = tuple(number - 1 for number in numbers)
    if not set(layers) <= recurrent:
        raise CheckpointError(
            f"{text.where}: ple_layer_ids is {numbers}, and may only name linear_attention layers, counted from 1"
        )
    end = text.values.get("eos_token_id")
    end = end[0] if isinstance(end, Sequence) and end else end
    if not isinstance(end, int):
        raise CheckpointError(f"{text.where}: eos_token_id is {end!r}; n-grams need the token that ends documents")
    ngrams = NGramConfig(
        layers=layers,
        size=text.positive("ngram_size", 3),
        heads=text.positive("heads_per_ngram", 8),
        width=text.positive("ple_embed_dim", text.positive("hidden_size")),
        conv_width=text.positive("ple_conv_kernel_size", 4),
        end_id=end,
        base=text.positive("ngram_vocab_size_base", 20_000_000),
        divisor=text.positive("make_ngram_vocab_size_divisible_by", 128),
        seed=text.integer("seed", 1234),
        vocab_size=text.positive("vocab_size"),
        parts=text.positive("split_ngram_parts", 512),
    )
    if ngrams.size < 2 or ngrams.conv_width < 2 or ngrams.width % ngrams.all_heads:
        raise CheckpointError(
            f"{text.where}: ngram_size {ngrams.size} and ple_conv_kernel_size {ngrams.conv_width} must be 2 or more, "
            f"and ple_embed_dim {ngrams.width} a multiple of the {ngrams.all_heads} n-gram heads"
        )
    return ngrams


def _splitmix64(value: int) -> int:
    value = (value + _GAMMA) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


def _primes(first: int, count: int) -> list[int]:
    """Return the first primes from `first` on."""
    found: list[int] = []
    number = max(first, 2)
    while len(found) < count:
        if all(number % divisor for divisor in range(2, math.isqrt(number) + 1)):
            found.append(number)
        number += 1
    return found
