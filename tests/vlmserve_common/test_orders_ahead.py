"""Orders that are taken before their turn come in order, and so does what goes wrong."""

from __future__ import annotations

import pytest
import torch

from vlmserve_common.errors import RankLostError
from vlmserve_common.parallel.group import Orders, TakenAhead


@pytest.mark.parametrize("error", [RankLostError("rank 1 of 2 lost another one"), MemoryError("no room")], ids=repr)
def test_what_goes_wrong_comes_behind_what_was_taken(error: Exception):
    given: list[torch.Tensor] = []
    Orders(lambda x: given.append(x.clone()) or x).give(b"an order")

    def exchange(x: torch.Tensor) -> torch.Tensor:
        if not given:
            raise error
        return x.copy_(given.pop(0))

    ahead = TakenAhead(Orders(exchange))
    assert ahead.take() == b"an order"
    with pytest.raises(type(error), match=str(error)):
        ahead.take()
