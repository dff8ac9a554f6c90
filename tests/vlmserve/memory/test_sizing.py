"""What has no room in memory is refused before weights are loaded, with the figures and the flag."""

from __future__ import annotations

import logging

import pytest
import torch

from vlmserve.commands.offline.llm import LLM
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine import build, model_loading
from vlmserve.memory import sizing
from vlmserve_common.errors import EngineError, SettingsError

GIB = 2**30
CPU = torch.device("cpu")


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with 10 GiB of memory free."""
    monkeypatch.setattr(sizing, "free_memory", lambda device: (10 * GIB, 10 * GIB))
    return monkeypatch


COMPUTING = sizing.Activations(tower=3 * GIB, step=GIB, logits=GIB // 2)

NOTHING = sizing.Activations()


def _slots(
    to_come: int = 0,
    device: torch.device = CPU,
    activations: sizing.Activations = NOTHING,
    **settings: object,
) -> int:
    return sizing.kv_cache_size(
        EngineArgs(model="m", **settings),
        bytes_per_token=2**20,
        max_model_len=4096,
        device=device,
        weights_to_come=to_come,
        activations=activations,
    )


def test_slots_by_memory(free: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert _slots() == 2048  # 2 GiB
    assert _slots(max_total_tokens=9000) == 8992
    assert caplog.text == ""
    with caplog.at_level(logging.WARNING):
        assert _slots(cpu_kv_cache_gib=100.0) == int(0.8 * 10 * 1024) // 16 * 16
    assert "--cpu-kv-cache-gib is 100, and --mem-fraction-static 0.8 of what is free is 8 GiB" in caplog.text


@pytest.mark.parametrize(
    ("to_come", "settings", "complaint"),
    [
        (
            0,
            {"max_total_tokens": 20000},
            r"--max-total-tokens is 20000, a KV cache of 19\.53 GiB; 10 GiB of memory are",
        ),
        (4 * GIB, {"max_total_tokens": 9000}, r"of which the weights take 4 GiB: 5824 slots of 1048576 bytes fit"),
        (10 * GIB, {}, r"there is room for 0 KV slots .* --cpu-kv-cache-gib"),
        (0, {"max_running_requests": 2 * 10**6}, r"--max-running-requests is 2000000: the tables .* \(--max-model-len"),
    ],
)
def test_no_room(free: pytest.MonkeyPatch, to_come: int, settings: dict[str, int], complaint: str) -> None:
    with pytest.raises(EngineError, match=complaint):
        _slots(to_come, **settings)


def test_what_computing_takes_stays_free(free: pytest.MonkeyPatch) -> None:
    assert COMPUTING.peak == 3 * GIB
    assert sizing.Activations(tower=3, step=2, logits=2).peak == 4
    assert _slots(cpu_kv_cache_gib=100.0, activations=COMPUTING) == int(0.8 * 7 * 1024) // 16 * 16
    gpu = torch.device("cuda:0")
    free.setattr(sizing, "free_memory", lambda device: (8 * GIB, 10 * GIB))
    assert _slots(device=gpu, mem_fraction_static=0.5, activations=COMPUTING) == 3 * 1024  # half a GPU is enough
    assert _slots(device=gpu, mem_fraction_static=0.9, activations=COMPUTING) == int(5 * 0.95 * 1024)
    everything = (
        r"room for 0 KV slots of 1048576 bytes, and at least 32 are needed; 8 GiB of memory are free on cuda:0, of "
        r"which the weights take 6 GiB and computing takes 3 GiB \(vision tower 3 GiB, prompt chunk 1 GiB, "
        r"logits 512 MiB\)"
    )
    with pytest.raises(EngineError, match=everything):
        _slots(6 * GIB, gpu, COMPUTING)
    with pytest.raises(
        EngineError, match=r"--max-total-tokens is 6000, .* free here .*, of which computing takes 3 GiB"
    ):
        _slots(activations=COMPUTING, max_total_tokens=6000)


def test_weights_that_do_not_fit_are_not_loaded(free: pytest.MonkeyPatch) -> None:
    loaded: list[object] = []
    free.setattr(model_loading, "load_model", lambda *args, **kwargs: loaded.append(args))
    free.setattr(sizing, "free_memory", lambda device: (2**20, 2**20))
    with pytest.raises(EngineError, match=r"the weights of .* take .* MiB in float32, and 1 MiB .* dtype bfloat16"):
        LLM(dtype="float32")
    free.setattr(sizing, "free_memory", lambda device: (GIB, GIB))
    with pytest.raises(EngineError, match=r"max_total_tokens is 1000000000, a KV cache of 1431 GiB"):
        LLM(max_total_tokens=10**9)
    with pytest.raises(SettingsError, match=r"max_model_len is 9999; the model was made for 4096 tokens"):
        LLM(max_model_len=9999)
    assert loaded == []


def test_a_gpus_memory(free: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda:0")
    free.setattr(sizing, "free_memory", lambda device: (60 * GIB, 80 * GIB))
    with pytest.raises(
        EngineError, match=r"the weights of m take 64 GiB in bfloat16, and 60 GiB .* free on cuda:0: take"
    ):
        sizing.check_weights_fit(64 * GIB, model="m", dtype=torch.bfloat16, device=gpu)
    assert _slots(device=gpu, mem_fraction_static=0.5) == (60 - 40) * 1024
    with pytest.raises(EngineError, match=r"60 GiB of memory are free on cuda:0, of which the weights take 30 GiB"):
        _slots(30 * GIB, device=gpu, mem_fraction_static=0.5)


@pytest.mark.parametrize(
    ("free_gib", "expected_mib"),
    [(1, 256), (16, 512), (83, 2656), (400, 8192)],
    ids=["room for 8192 rows at the least", "a 32nd", "of the 235B on eight GPUs", "262144 rows at the most"],
)
def test_the_cache_of_embeddings(free_gib: float, expected_mib: int) -> None:
    """Rows of 32 KiB, as those of Qwen3-VL-8B and of the 235B."""
    args = EngineArgs(model="m")
    assert sizing.embeds_bytes(args, row_bytes=2**15, free=free_gib * GIB) == expected_mib * 2**20
    for asked in (0, 7, 10**6):
        args = EngineArgs(model="m", encoder_cache_mib=asked)
        assert sizing.embeds_bytes(args, row_bytes=2**15, free=free_gib * GIB) == asked * 2**20


def test_an_engine_keeps_its_embeddings_in_memory_that_slots_do_not_get(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for module in (sizing, build):
        monkeypatch.setattr(module, "free_memory", lambda device: (GIB // 4, GIB // 4))
    for asked in (None, 100):
        with LLM(num_threads=1, media_processes=0, encoder_cache_mib=asked, mem_fraction_static=0.95) as llm:
            width = llm._runner.model.visual.row_width * llm._runner.model.dtype.itemsize
            found.append((llm.engine.loop.encoder.cache.device.limit_bytes, llm.info.max_total_tokens))
    (default, slots), (given, fewer) = found
    assert default == max(GIB // 4 // 32, 8192 * width)
    assert given == 100 * 2**20
    per_slot = sum(part.nbytes for layer in llm._runner.kv_cache.layers for part in (layer.keys, layer.values))
    per_slot //= fewer + llm.args.page_size
    assert (slots - fewer) * per_slot == pytest.approx(0.95 * (given - default), rel=0.01)


def test_the_hosts_slots(monkeypatch):
    monkeypatch.setattr(sizing, "free_memory", lambda device: (8 * 2**30, 8 * 2**30))

    def slots(**settings: object) -> int:
        args = EngineArgs(model="m", **settings)
        return sizing.host_pool_size(args, bytes_per_token=2**20, device=CPU)

    assert slots() == 0
    assert slots(enable_hierarchical_cache=True, disable_radix_cache=True) == 0
    assert slots(enable_hierarchical_cache=True) == 4096 - 16
    assert slots(enable_hierarchical_cache=True, hicache_size_gib=1.01, page_size=64) == 1024 - 64
    with pytest.raises(EngineError, match=r"--hicache-size-gib is 7.9, room for .* 8 GiB of memory are free"):
        slots(enable_hierarchical_cache=True, hicache_size_gib=7.9)
    with pytest.raises(EngineError, match=r"--hicache-size-gib is 4 for each of 2 ranks, room for 4080 .* 8 GiB"):
        slots(enable_hierarchical_cache=True, tp_size=2)
    with pytest.raises(EngineError, match=r"--hicache-size-gib is 0.03, room for 0 tokens of 1048576 bytes"):
        slots(enable_hierarchical_cache=True, hicache_size_gib=0.03)


@pytest.mark.parametrize("windowed", [1, 30, 99])
def test_layers_with_windows_take_less(windowed: int) -> None:
    windows = sizing.WindowRoom(1000, windowed)
    assert sizing.kv_bytes(5000, 100, windows) == 5000 * (100 - windowed) + 1000 * windowed
    for nbytes in range(0, 300_000, 777):
        tokens = sizing.kv_tokens(nbytes, 100, windows)
        assert sizing.kv_bytes(tokens, 100, windows) <= nbytes < sizing.kv_bytes(tokens + 1, 100, windows)
    assert sizing.kv_bytes(10**9, 100, sizing.WindowRoom(1000, 100)) == 100_000
