"""The adapters that a process has: loaded from their folders, found by their digests."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn

from vlmserve_common.checkpoint.adapter_file import AdapterFile, read_adapter
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.compute.lora import ActiveAdapters, Adapter, AdapterLayout, attach
from vlmserve_common.compute.lora_tables import AdapterTables
from vlmserve_common.errors import CheckpointError


class AdapterStore:
    """The adapters of a module, which is this process's part of a model.

    layout: of the module; whole: of the model, if this is another one. max_rank: the highest rank. partly: see
    `AdapterLayout.check`. most: how many adapters may be here before those that were used longest ago go; None: as many
    as were loaded and not unloaded.
    """

    def __init__(
        self,
        module: nn.Module,
        layout: AdapterLayout,
        *,
        dtype: torch.dtype,
        max_rank: int,
        whole: AdapterLayout | None = None,
        partly: bool = False,
        most: int | None = None,
    ) -> None:
        self.active = ActiveAdapters()
        self._module, self._layout, self._whole = module, layout, whole or layout
        self._dtype, self._max_rank, self._partly, self._most = dtype, max_rank, partly, most
        self._adapters: OrderedDict[str, Adapter] = OrderedDict()
        attach(module, layout, self.active)

    def load(self, folder: Path) -> tuple[AdapterRef, tuple[str, ...]]:
        """Load an adapter. Return it, and the modules of it that are not in this model. Raises CheckpointError."""
        file = read_adapter(folder, max_rank=self._max_rank)
        left_out = self._whole.check(file, partly=self._partly)
        self._place(file)
        tower = any(self._layout.our_name(name).startswith("visual.") for name in file.pairs)
        return AdapterRef(digest=file.digest, path=str(folder), tower=tower), left_out

    def unload(self, digest: str) -> None:
        """Forget an adapter, which may be unknown."""
        self._adapters.pop(digest, None)

    def get(self, ref: AdapterRef) -> Adapter:
        """Return an adapter, which is read from its folder if it is not here. CheckpointError if that has changed."""
        if ref.digest not in self._adapters:
            file = read_adapter(Path(ref.path), max_rank=self._max_rank)
            if file.digest != ref.digest:
                raise CheckpointError(f"{ref.path} has changed since the adapter was loaded: load it again")
            self._place(file)
        self._adapters.move_to_end(ref.digest)
        return self._adapters[ref.digest]

    def tables(self, rows: int, *, most: int, device: torch.device) -> AdapterTables:
        """Make tables for captured steps of the decoder with up to `most` adapters and `rows` rows."""
        products = self._layout.products("language_model.")
        return AdapterTables(self.active, products, most=most, max_rank=self._max_rank, rows=rows, device=device)

    @contextmanager
    def rows(self, digests: Sequence[str], counts: Sequence[int]) -> Iterator[None]:
        """Let adapters that are here change what is computed: so many rows each, one behind the other. "": none."""
        with self.active.use(
            [(self._adapters[one] if one else None, n) for one, n in zip(digests, counts, strict=True)]
        ):
            yield

    def _place(self, file: AdapterFile) -> None:
        if file.digest not in self._adapters:
            self._adapters[file.digest] = self._layout.place(file, self._module, dtype=self._dtype)
            while self._most is not None and len(self._adapters) > self._most:
                self._adapters.popitem(last=False)
