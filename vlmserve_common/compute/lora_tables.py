"""The addresses of adapters' factors in memory that stays, so that captured steps find other adapters each time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from vlmserve_common.compute.lora import ActiveAdapters, Adapter, are_same

if TYPE_CHECKING:
    from vlmserve_common.kernels.gpu.lora import DeviceFactors


class AdapterTables:
    """Tables for the products of captured steps, which the GPU's kernels read. A step without adapters needs none.

    active: the adapters of what is computed. products: the sizes of each product's parts, by its name. most: adapters
    of a step. max_rank: of each. rows: of the largest step.
    """

    def __init__(
        self,
        active: ActiveAdapters,
        products: Mapping[str, Sequence[int]],
        *,
        most: int,
        max_rank: int,
        rows: int,
        device: torch.device,
    ) -> None:
        self.active = active
        self._most, self._max_rank = most, max_rank
        self._place = {name: number for number, name in enumerate(products)}
        self._widths = [max_rank * len(sizes) for sizes in products.values()]
        # [products, of a and of b, adapters], as `FactorsTable` has them
        self._addresses = torch.zeros(len(products), 2, most, dtype=torch.int64, device=device)
        self._ranks = torch.zeros(len(products), 2, most, dtype=torch.int32, device=device)
        self._rows = torch.full((rows,), -1, dtype=torch.int32, device=device)
        self._parts = [
            torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes)).to(device, torch.int32)
            for sizes in products.values()
        ]
        self._held: tuple[Adapter, ...] = ()

    @property
    def can_hold(self) -> bool:
        """Whether these tables have all that the active adapters change in a step's products."""
        adapters = self.active.adapters
        return len(adapters) <= self._most and not any(one.has_experts for one in adapters)

    def hold(self) -> None:
        """Take over the active adapters, and whose the rows are. The tables keep the adapters' factors alive."""
        adapters, rows = self.active.adapters, self.active.rows
        if not are_same(adapters, self._held):
            found = [[self._factors(one, name) for one in adapters] for name in self._place]
            addresses, ranks = np.zeros(self._addresses.shape, np.int64), np.zeros(self._ranks.shape, np.int32)
            for number, of_product in enumerate(found):
                for place, one in enumerate(of_product):
                    if one is not None:
                        addresses[number, :, place] = one.a.data_ptr(), one.b.data_ptr()
                        ranks[number, :, place] = len(one.a), len(one.b)
            self._addresses.copy_(torch.from_numpy(addresses))
            self._ranks.copy_(torch.from_numpy(ranks))
            self._held = adapters
        whole = np.full(len(self._rows), -1, np.int32)  # padding is of no adapter
        whole[: len(rows)] = rows
        self._rows.copy_(torch.from_numpy(whole))

    def added(self, name: str, x: torch.Tensor) -> torch.Tensor | None:
        """Return what the adapters that are held add to a product of x [M, inputs], [M, outputs]; None for a product
        that no adapter may change. It decides nothing by what the tables hold, so a capture of it is of any."""
        if name not in self._place:
            return None
        from vlmserve_common.kernels.gpu import lora as kernels  # not where there is no GPU

        number = self._place[name]
        table = kernels.FactorsTable(
            addresses=self._addresses[number],
            ranks=self._ranks[number],
            parts=self._parts[number],
            most=self._widths[number],
        )
        return kernels.added(x.contiguous(), table, self._rows[: len(x)])

    @staticmethod
    def _factors(adapter: Adapter, name: str) -> DeviceFactors | None:
        found: DeviceFactors | None = adapter.factors.get((name, 0))  # type: ignore[assignment]
        return found
