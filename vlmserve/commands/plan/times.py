"""The least time of a step: bytes over the bandwidth, operations over the rate, exchanges over the links."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.layout import Layout, SpreadModel, StageShare
from vlmserve.models.floors import attention_flops, part_hit, tower_flops
from vlmserve_common.checkpoint.fp8 import Fp8Scheme


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The least time of a step: the seconds of all its stages, and of the slowest one.

    `exchange_seconds` is the part in which GPUs wait for results of other GPUs. `bytes_read` is for the GPU that reads
    most. `tokens_per_second` is for all GPUs, with as many steps under way as there are stages.
    """

    seconds: float
    slowest_stage_seconds: float
    exchange_seconds: float
    bytes_read: float
    tokens_per_second: float


@dataclass(frozen=True, kw_only=True)
class _Step:
    """A step of one stage. tokens, rows: of the layers and the head, for a GPU's group. all_tokens: of all groups.

    read: bytes. attention: operations.
    """

    tokens: float
    all_tokens: float
    rows: float
    read: float
    attention: float


class Times:
    """The times of a model that is spread over GPUs. Exchanges count if the GPU's link is known."""

    def __init__(self, model: SpreadModel, layout: Layout, gpu: Gpu) -> None:
        self._model, self._layout, self._gpu = model, layout, gpu
        scheme = model.scheme
        in_8_bits = isinstance(scheme, Fp8Scheme) and scheme.inputs is not None and gpu.fp8_flops
        self._rate = gpu.fp8_flops if in_8_bits else gpu.flops

    def decode(self, batch: int, context: int) -> Floor:
        """Return the floor of a step of `batch` requests of a replica with `context` tokens each."""
        mine = -(-batch // self._layout.groups)
        outline = self._model.outline
        hit = part_hit(self._model.config.experts, batch)
        found = []
        for stage in self._model.stages:
            state = 0 if stage.state is None else stage.state.nbytes
            read = stage.dense + stage.experts * hit + stage.head_numbers * outline.dtype.itemsize
            read += mine * (context * stage.kv + state)
            attention = 4.0 * stage.kv_layers * outline.config.num_heads * outline.config.head_dim * context * mine
            found.append((stage, _Step(tokens=mine, all_tokens=batch, rows=mine, read=read, attention=attention)))
        return self._floor(found, batch)

    def prefill(self, tokens: int) -> Floor:
        """Return the floor of a prompt of `tokens` tokens in each group of a replica's ranks."""
        groups = self._layout.groups
        hit = part_hit(self._model.config.experts, groups * tokens)
        found = []
        for stage in self._model.stages:
            step = _Step(
                tokens=tokens,
                all_tokens=groups * tokens,
                rows=1,
                read=stage.dense + stage.experts * hit,
                attention=attention_flops(self._model.outline.config, stage.kv_layers, tokens),
            )
            found.append((stage, step))
        return self._floor(found, groups * tokens)

    def picture(self, side: int) -> float:
        """Return the seconds of a picture of side x side pixels in the tower, which one GPU computes."""
        tower = self._model.outline.visual
        patch = tower.patch_embed.proj.kernel[-1]
        return tower_flops(tower, 1, (side // patch) ** 2) / self._gpu.flops

    def _floor(self, steps: list[tuple[StageShare, _Step]], tokens: float) -> Floor:
        seconds = [self._computing(stage, step) for stage, step in steps]
        exchange = [self._exchange(stage, step) for stage, step in steps]
        both = [sum(one) for one in zip(seconds, exchange, strict=True)]
        return Floor(
            seconds=sum(both),
            slowest_stage_seconds=max(both),
            exchange_seconds=sum(exchange),
            bytes_read=max(step.read for _, step in steps),
            tokens_per_second=self._layout.replicas * tokens / max(both),
        )

    def _computing(self, stage: StageShare, step: _Step) -> float:
        experts = self._model.config.experts
        used = 0.0 if experts is None else experts.chosen / experts.count
        products = stage.dense_numbers * step.tokens + stage.expert_numbers * used * step.all_tokens
        computing = (
            2 * products / self._rate
            + (2 * stage.head_numbers * step.rows * self._layout.groups + step.attention) / self._gpu.flops
        )
        return max(step.read / self._gpu.bandwidth, computing)

    def _exchange(self, stage: StageShare, step: _Step) -> float:
        """Return the seconds of a stage's exchanges.

        These are two sums a layer over all ranks that share it, one sum of embeddings, and the logits for the first
        rank. Groups share all but attention: that part gathers the tokens of all groups and scatters their sums.
        """
        if not self._gpu.link:
            return 0.0
        layout, config = self._layout, self._model.config
        row = config.hidden_size * self._model.outline.dtype.itemsize
        layers = stage.last - stage.first
        moved = layers * _all_reduce(layout.attention_tp) * step.tokens * row
        moved += (layers + (stage.first == 0)) * _all_reduce(layout.tp) * step.all_tokens * row
        if stage.head_numbers:
            moved += (1 - 1 / layout.tp) * step.rows * layout.groups * config.vocab_size * 4
        if stage.first:
            moved += step.tokens * row
        return moved / self._gpu.link


def _all_reduce(ranks: int) -> float:
    """Return what each rank sends of every byte: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks
