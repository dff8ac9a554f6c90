"""What a step takes at the least: bytes over the bandwidth, operations over the rate, exchanges over the links."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve.commands.plan.gpus import Gpu
from vlmserve.commands.plan.layout import Layout, Model, Stage
from vlmserve.models.floors import attention_flops, part_hit, tower_flops
from vlmserve_common.checkpoint.fp8 import Fp8Scheme


@dataclass(frozen=True, kw_only=True)
class Floor:
    """Seconds of a step: of its stages one after the other, and the slowest of these; exchange: of all of them what
    GPUs wait for each other's results. read: bytes, by the GPU that reads most. rate: tokens a second of all GPUs,
    with as many steps under way as there are stages."""

    seconds: float
    slowest: float
    exchange: float
    read: float
    rate: float


@dataclass(frozen=True, kw_only=True)
class _Step:
    """Of one stage. tokens, rows: of the layers and of the head, for a GPU's group; all_tokens: of all groups."""

    tokens: float
    all_tokens: float
    rows: float
    read: float
    attention: float


class Times:
    """Of a model so spread over such GPUs. What is exchanged counts where the GPU's link is known."""

    def __init__(self, model: Model, layout: Layout, gpu: Gpu) -> None:
        self._model, self._layout, self._gpu = model, layout, gpu
        scheme = model.scheme
        in_8_bits = isinstance(scheme, Fp8Scheme) and scheme.inputs is not None and gpu.fp8_flops
        self._rate = gpu.fp8_flops if in_8_bits else gpu.flops

    def decode(self, batch: int, context: int) -> Floor:
        """Of a step of `batch` requests of a replica with `context` tokens each."""
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
        """Of one prompt of so many tokens, in each group of a replica's ranks."""
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
        """Of a picture of side x side pixels in the tower, which one GPU computes."""
        tower = self._model.outline.visual
        patch = tower.patch_embed.proj.kernel[-1]
        return tower_flops(tower, 1, (side // patch) ** 2) / self._gpu.flops

    def _floor(self, steps: list[tuple[Stage, _Step]], tokens: float) -> Floor:
        seconds = [self._computing(stage, step) for stage, step in steps]
        exchange = [self._exchange(stage, step) for stage, step in steps]
        both = [sum(one) for one in zip(seconds, exchange, strict=True)]
        return Floor(
            seconds=sum(both),
            slowest=max(both),
            exchange=sum(exchange),
            read=max(step.read for _, step in steps),
            rate=self._layout.replicas * tokens / max(both),
        )

    def _computing(self, stage: Stage, step: _Step) -> float:
        experts = self._model.config.experts
        used = 0.0 if experts is None else experts.chosen / experts.count
        products = stage.dense_numbers * step.tokens + stage.expert_numbers * used * step.all_tokens
        computing = (
            2 * products / self._rate
            + (2 * stage.head_numbers * step.rows * self._layout.groups + step.attention) / self._gpu.flops
        )
        return max(step.read / self._gpu.bandwidth, computing)

    def _exchange(self, stage: Stage, step: _Step) -> float:
        """Two sums a layer over all that share it, one of embeddings, and the logits for the first of them. What groups
        share, all but attention, gets the tokens of all (an all-gather), and these their sums (a reduce-scatter)."""
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
    """What each sends of every byte: a reduce-scatter and an all-gather."""
    return 2 * (ranks - 1) / ranks
