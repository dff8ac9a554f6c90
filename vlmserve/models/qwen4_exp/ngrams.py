"""Embeddings of n-grams: rows that hashes of the last token ids find in large tables, added to the streams."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn
from torch.nn import functional as F

from vlmserve.memory.recurrent_cache import RecurrentStep
from vlmserve.models.attention.base import ForwardBatch
from vlmserve.models.config import ModelConfig
from vlmserve.models.delta_net import ConvWeight
from vlmserve.models.qwen4_exp.config import NGramConfig, NGramHashes
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.checkpoint.weights import WeightRules
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.delta_rule import dilated_conv
from vlmserve_common.compute.layers import VocabEmbedding, ZeroCentredRMSNorm
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.shard import Cut, Cuts
from vlmserve_common.errors import CheckpointError

_SMALLEST = 1e-6


class NGramTable(VocabEmbedding):
    """The rows of all heads of one layer. Processes that share the model have some rows each. In a checkpoint, a table
    is cut into tensors `shard_0` ... of so many rows each: `parts`."""

    def __init__(self, config: NGramConfig, index: int, comm: Communicator) -> None:
        count = config.rows(index)
        super().__init__(count, config.width // config.all_heads, comm)
        self.count = count
        each = -(-count // config.parts)
        self.parts = [min(each, count - first) for first in range(0, count, each)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int64 [N, heads] -> [N, heads * size]."""
        if self._comm.shard.is_whole:
            return F.embedding(ids, self.weight).flatten(1)
        own = self._comm.all_tokens(ids) - self.cut.start
        elsewhere = (own < 0) | (own >= self.cut.size)
        rows = F.embedding(own.masked_fill(elsewhere, 0), self.weight)
        return self._comm.all_reduce(rows.masked_fill_(elsewhere[..., None], 0).flatten(1))

    def stored_parameters(self, name: str) -> Iterator[tuple[str, torch.Tensor]]:
        """See `checkpoint.weights`."""
        for stored, first, last, _ in self._pieces(name):
            if last > first:
                yield stored, self.weight[first - self.cut.start : last - self.cut.start]

    def stored_cuts(self, name: str) -> Iterator[tuple[str, Cut]]:
        """See `checkpoint.weights`."""
        for stored, first, last, (start, rows) in self._pieces(name):
            if 0 < last - first < rows:
                yield stored, Cut(0, first - start, last - first, rows)

    def stored_elsewhere(self, name: str) -> Iterator[str]:
        """See `checkpoint.weights`."""
        yield from (stored for stored, first, last, _ in self._pieces(name) if last <= first)

    def _pieces(self, name: str) -> Iterator[tuple[str, int, int, tuple[int, int]]]:
        """Yield the name of each stored tensor; which rows [first, last) of the table it has for this process; the
        table's row that it begins with, and its rows."""
        start, end = 0, self.cut.start + self.cut.size
        for number, rows in enumerate(self.parts):
            yield f"{name}.shard_{number}.weight", max(start, self.cut.start), min(start + rows, end), (start, rows)
            start += rows


class NGramEmbedding(nn.Module):
    """A table, and the hashes that find its rows. index: the layer's number among the n-gram layers of the model."""

    def __init__(self, config: NGramConfig, index: int, comm: Communicator) -> None:
        super().__init__()
        self.ngram_embedding = NGramTable(config, index, comm)
        self.hashes = config.hashes(index)
        self._heads = config.heads
        self._numbers: torch.Tensor | None = None

    def forward(self, contexts: torch.Tensor) -> torch.Tensor:
        """Look up contexts int64 [N, size], a token and those before it -> [N, width]."""
        if self._numbers is None:
            numbers = [self.hashes.sizes, self.hashes.offsets]
            self._numbers = torch.tensor(numbers, device=contexts.device).unflatten(1, (-1, self._heads))
        sizes, offsets = self._numbers
        multipliers = self.hashes.multipliers
        mixed, rows = contexts[:, 0] * multipliers[0], []
        for n, multiplier in enumerate(multipliers[1:], 1):
            mixed = mixed ^ (contexts[:, n] * multiplier)
            rows.append(mixed[:, None] % sizes[n - 1] + offsets[n - 1])
        return self.ngram_embedding(torch.cat(rows, dim=1))

    def join(self, x: torch.Tensor) -> None:
        """Join the collectives of other groups' tokens while this group has none, given int64 [0]."""
        self.ngram_embedding(x.new_empty((0, len(self.hashes.sizes))))


class NGramLayer(nn.Module):
    """Adds n-gram embeddings to the streams, through gates, and a convolution over them (`Qwen4ExpTextPLELayer` in
    transformers). place: the layer's number among those of this process."""

    def __init__(self, config: ModelConfig, index: int, place: int, comm: Communicator) -> None:
        super().__init__()
        assert config.ngrams is not None
        assert config.streams is not None
        ngrams, size, hidden = config.ngrams, config.stream_size, config.hidden_size
        self.ple_embedding = NGramEmbedding(ngrams, index, comm)
        self.key_proj = Linear(ngrams.width, size, bias=False)
        self.value_proj = Linear(ngrams.width, hidden, bias=False)
        self.norm_key, self.norm_query, self.norm_conv = (
            ZeroCentredRMSNorm(size, config.rms_norm_eps, config.streams.count) for _ in range(3)
        )
        self.conv1d = ConvWeight(Cuts((Cut(0, 0, size, size),)), ngrams.conv_width)
        self._place, self._dilation, self._hidden = place, ngrams.size, hidden

    def forward(self, x: torch.Tensor, forward_batch: ForwardBatch) -> torch.Tensor:
        """x [N, streams * hidden] -> the same with the embeddings added, a new tensor."""
        step, contexts = forward_batch.recurrent, forward_batch.ngrams
        assert step is not None, "a step without states"
        assert contexts is not None, "a step without n-grams"
        found = self.ple_embedding(contexts)
        streams = (-1, self._hidden)
        keys, queries = (
            normed.unflatten(-1, streams) for normed in (self.norm_key(self.key_proj(found)), self.norm_query(x))
        )
        scores = (keys * queries).sum(-1, keepdim=True) / self._hidden**0.5
        gates = (scores.abs().clamp_min(_SMALLEST).sqrt() * scores.sign()).sigmoid()
        values = (gates * self.value_proj(found).unsqueeze(-2)).flatten(-2)
        return x + values + self._convolved(self.norm_conv(values), step)

    def _convolved(self, x: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
        kept, out = step.cache.guesses, torch.empty_like(x)
        guesses = None if kept is None else kept.ngram_conv[:, self._place]
        for tokens, inputs in step.slide(step.cache.ngram_conv[:, self._place], guesses, x):
            out[tokens] = dilated_conv(inputs, self.conv1d.weight[:, 0], self._dilation)
        return out


def ngram_contexts(config: NGramConfig, input_ids: torch.Tensor, step: RecurrentStep) -> torch.Tensor:
    """Return int64 [N, size]: each of the step's tokens and those before it, the last one first. Update the ids that
    requests keep.

    Tokens before the start of a text, and those that a token which ends documents separates from this one, are
    themselves that token. Kept ids count from that token's, so that a state of zeros is one before a text.
    """
    out = input_ids.new_empty((len(input_ids), config.size))
    kept = step.cache.guesses
    relative = input_ids - config.end_id
    for tokens, ids in step.slide(step.cache.ngram_ids, None if kept is None else kept.ngram_ids, relative):
        length = ids.shape[-1] - config.size + 1
        found = [ids.narrow(-1, config.size - 1, length)]
        for n in range(1, config.size):
            earlier = ids.narrow(-1, config.size - 1 - n, length)
            found.append(earlier if n == 1 else earlier.masked_fill(found[-1] == 0, 0))
        out[tokens] = torch.stack(found, dim=-1)
    return out.add_(config.end_id)


def take_stored_tables(module: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
    """Let each table know into which tensors a checkpoint cuts it. shapes: of its tensors, by our names."""
    for name, child in module.named_modules():
        if isinstance(child, NGramTable):
            pattern = re.compile(rf"{re.escape(name)}\.shard_(\d+)\.weight$")
            rows = {int(m[1]): shape[0] for stored, shape in shapes.items() if (m := pattern.match(stored))}
            if sorted(rows) == [*range(len(rows))] and sum(rows.values()) == child.count:
                child.parts = [rows[number] for number in range(len(rows))]


def read_stored_hashes(module: nn.Module, reader: CheckpointReader, rules: WeightRules) -> None:
    """Take the hashes that a checkpoint has, in place of those that follow from its config.json. CheckpointError for
    impossible ones."""
    stored = {rules.our_name(name): tensor for name, tensor in reader.tensors.items()}
    for name, child in module.named_modules():
        if not isinstance(child, NGramEmbedding):
            continue
        for field, leaf in _STORED.items():
            tensor, own = stored.get(f"{name}.{leaf}"), getattr(child.hashes, field)
            if tensor is None:
                continue
            if tensor.shape != (len(own),) or tensor.dtype != torch.int64:
                raise CheckpointError(
                    f"{reader.folder}: {tensor.name} is {list(tensor.shape)} of {tensor.dtype}, not [{len(own)}] of "
                    "int64"
                )
            read = torch.empty(len(own), dtype=torch.int64)
            reader.read_into([(tensor, read)])
            child.hashes = replace(child.hashes, **{field: tuple(read.tolist())})
        _check(child.hashes, child.ngram_embedding.count, f"{reader.folder}: {name}")


def _check(hashes: NGramHashes, rows: int, where: str) -> None:
    for size, offset in zip(hashes.sizes, hashes.offsets, strict=True):
        if not (size > 0 and 0 <= offset <= rows - size):
            raise CheckpointError(f"{where}: rows {offset} .. {offset + size - 1} of a table of {rows} rows")


_STORED = {
    "multipliers": "layer_multipliers",
    "sizes": "ngram_heads_vocab_sizes",
    "offsets": "ngram_heads_offsets",
}
STORED_HASHES = rf"\.ple_embedding\.(?:{'|'.join(_STORED.values())})$"
"""The names of tensors that `read_stored_hashes` reads."""
