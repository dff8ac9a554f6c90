"""The table of pages, under Triton's interpreter where there is no GPU."""

from __future__ import annotations

import pytest
import torch

from vlmserve_common.kernels.gpu import page_table


@pytest.mark.parametrize("page_size", [1, 3, 16])
@pytest.mark.parametrize("block", [4, 1024])
def test_pages_of_requests_one_after_the_other(page_size, block, monkeypatch):
    monkeypatch.setattr(page_table, "_BLOCK", block)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    pages = torch.randperm(60, generator=generator).view(4, 15)
    table = (pages[:, :, None] * page_size + torch.arange(page_size)).flatten(1).int().to(device)
    rows, counts = [3, 0, 2], [1, 15, 9]
    starts = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
    out = torch.full((sum(counts) + 1,), -1, dtype=torch.int32, device=device)
    page_table.page_indices(
        table,
        torch.tensor(rows, device=device),
        starts.to(device),
        out[:-1],
        page_size=page_size,
        most=max(counts),
    )
    want = torch.cat([pages[row, :count] for row, count in zip(rows, counts, strict=True)])
    assert out.tolist() == [*want.tolist(), -1]
