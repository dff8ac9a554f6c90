"""The layers of a pipeline stage, by their numbers in the whole model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import nn

from vlmserve_common.checkpoint.weights import WeightRules


class StageLayers(nn.ModuleList):
    """Layers first .. of a model that has `whole`. Weights are named by these numbers, as in the checkpoint; an index
    counts those that are here."""

    def __init__(self, layers: Iterable[nn.Module], *, first: int, whole: int) -> None:
        super().__init__()
        self.first, self.whole = first, whole
        for number, layer in enumerate(layers, first):
            self.add_module(str(number), layer)

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def rules(self, rules: WeightRules) -> WeightRules:
        """Those by which this stage's weights are found, for those of the whole model: tensors of other stages are
        passed over. What is needed here is a parameter, and so never ignored."""
        others = [str(number) for number in range(self.whole) if not 0 <= number - self.first < len(self)]
        if not others:
            return rules
        elsewhere = (
            rf"\blayers\.(?:{'|'.join(others)})\.",
            r"\bembed_tokens\.weight$",
            r"(?:^|[._])model\.norm\.weight$",
        )
        return replace(rules, ignored=(*rules.ignored, *elsewhere))
