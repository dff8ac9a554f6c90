"""The torch backend against attention written out, over histories that lie in one run, in several, or scattered."""

import pytest
import torch

from tests.vlmserve_common.kernels.paged_step import make_step
from vlmserve.memory.kv_cache import KVCache
from vlmserve.models.attention import torch_backend
from vlmserve.models.attention.base import RadixAttention
from vlmserve.models.attention.torch_backend import MAX_RUNS, TorchAttentionBackend
from vlmserve_common.compute.rotary import rotation

CPU = torch.device("cpu")


@pytest.mark.parametrize("page", [1, 20, 200], ids=["scattered", "runs", "run"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lengths", [[(0, 9), (37, 5)], [(50, 1), (8, 1), (1, 1)], [(20, 1), (0, 12), (33, 30)]])
@pytest.mark.parametrize("window", [0, 1, 6, 21])
def test_equals_attention_written_out(page, dtype, lengths, window):
    step = make_step(lengths, heads=(6, 2), dtype=dtype, page=page, device=CPU)
    backend = TorchAttentionBackend()
    batch = step.batch(backend)
    backend.init_forward_metadata(batch)
    unturned = rotation(torch.zeros(len(step.qkv), 8), dtype)
    out = RadixAttention(6, 16, 0.3, 2, layer_id=0, window=window)(step.qkv, unturned, None, batch)
    wanted = step.truth(0.3, window=window).flatten(1)
    assert torch.allclose(out.double(), wanted, atol=1e-5 if dtype == torch.float32 else 3e-2)


def test_a_history_in_few_runs_is_read_where_it_lies():
    """No gather: the attended keys share the cache's memory."""
    cache = KVCache(num_slots=100, num_layers=1, num_kv_heads=2, head_dim=16, dtype=torch.float32, device=CPU)
    whole = cache.layers[0].keys.untyped_storage().data_ptr()
    for slots, copies in (
        (torch.arange(5, 60), False),
        (torch.cat([torch.arange(50, 60), torch.arange(5, 20)]), False),
        (torch.arange(0, 4 * MAX_RUNS, 2), True),
    ):
        past = torch_backend._past(torch_backend._history(slots.numpy(), slots), cache, 0, torch.float32)
        assert sum(len(keys) for keys, _ in past) == len(slots)
        assert all(keys.untyped_storage().data_ptr() == whole for keys, _ in past) != copies
