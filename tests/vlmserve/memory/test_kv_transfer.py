"""Copies between the KV cache and the host keep every bit."""

import numpy as np
import pytest
import torch

from vlmserve.memory import kv_transfer
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.kv_transfer import KVCopyJob, KVTransfer


def make(dtype: torch.dtype) -> KVCache:
    cache = KVCache(num_slots=24, num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype, device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    for layer in cache.layers:
        for part in tensors(layer):
            data = part.view(torch.uint8)
            data.copy_(torch.randint(0, 256, data.shape, generator=generator, dtype=torch.uint8))
    return cache


def tensors(layer) -> list[torch.Tensor]:
    return [part for part in vars(layer).values() if part is not None]


def snapshot(cache: KVCache) -> list[torch.Tensor]:
    """Bytes, since NaN is not equal to itself."""
    return [part.view(torch.uint8).clone() for layer in cache.layers for part in tensors(layer)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8], ids=str)
@pytest.mark.parametrize("staged", [1, 150, 2**20], ids="staged {}".format)
def test_bits_survive(dtype, staged, monkeypatch):
    monkeypatch.setattr(kv_transfer, "STAGED_BYTES", staged)
    cache = make(dtype)
    transfer = KVTransfer(cache, 16)
    assert transfer.piece_tokens == max(1, staged // KVCache.bytes_per_token(3, 2, 8, dtype))
    before = snapshot(cache)
    slots, other = np.array([4, 5, 6, 20, 8]), np.array([12, 13, 1, 2, 3])
    host = np.array([1, 2, 9, 10, 4])
    transfer.run([KVCopyJob(direction="to_host", device_slots=slots, host_slots=host)])
    for part in (part for layer in cache.layers for part in tensors(layer)):
        part.view(torch.uint8)[slots] ^= 255
    transfer.run([KVCopyJob(direction="to_device", device_slots=other, host_slots=host)])
    for was, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[other], was[slots])
        assert torch.equal(now[slots], was[slots] ^ 255)
        rest = [slot for slot in range(24) if slot not in {*slots.tolist(), *other.tolist()}]
        assert torch.equal(now[rest], was[rest])


def test_jobs_are_done_in_their_order():
    cache = make(torch.float32)
    transfer = KVTransfer(cache, 4)
    before = snapshot(cache)

    def job(direction, device, host):
        return KVCopyJob(direction=direction, device_slots=np.array(device), host_slots=np.array(host))

    # 1 -> host 2 -> 5, and then host 2 is written anew from 3, which went to 6
    transfer.run(
        [job("to_host", [1], [2]), job("to_device", [5], [2]), job("to_host", [3], [2]), job("to_device", [6], [2])]
    )
    for was, now in zip(before, snapshot(cache), strict=True):
        assert torch.equal(now[[5, 6]], was[[1, 3]])
