"""Layers in one call of the operators: what they compute one by one, bit for bit, for all decoders and caches."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.vlmserve.models.batches import forward_batch, make_config
from vlmserve.memory.kv_cache import KVCache
from vlmserve.memory.req_to_token import ReqToTokenPool
from vlmserve.models.attention.base import ForwardMode
from vlmserve.models.attention.native_backend import NativeAttentionBackend
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve.models.config import ExpertsConfig, ModelConfig
from vlmserve.models.decoder import Decoder
from vlmserve.models.qwen import Qwen2Decoder, Qwen3Decoder
from vlmserve_common.kernels import library

CPU = torch.device("cpu")
LAYERS = 3
SLOTS = 700
# new tokens of each request, step by step; 0: it is not in the step
STEPS = st.lists(
    st.lists(st.one_of(st.just(1), st.integers(0, 9), st.just(70)), min_size=3, max_size=3).filter(any),
    min_size=1,
    max_size=3,
)
SHAPES = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


class OneByOne(NativeAttentionBackend):
    """The same attention, for a decoder that goes through its layers itself: the reference."""

    def whole_layers(self, *_: object) -> None:
        return None


class Counting(NativeAttentionBackend):
    """Counts the layers whose attention it computes by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = 0

    def forward(self, *arguments):
        self.layers += 1
        return super().forward(*arguments)


@pytest.fixture(autouse=True)
def operators():
    said = library.activate("auto", threads=2)
    if library.active() is None:
        pytest.skip(said)
    yield
    library.activate("off", threads=1)


def make_decoder(family: type[Decoder], config: ModelConfig, dtype: torch.dtype, mode=None) -> Decoder:
    """With random weights, packed."""
    generator = torch.Generator().manual_seed(1)
    decoder = family(config, dtype).to(dtype)
    for parameter in decoder.parameters():
        size = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
        offset = 0.0 if parameter.ndim > 1 else 1.0
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * size + offset)
    decoder.pack(mode)
    return decoder


class Runner:
    """A decoder over pools of its own."""

    def __init__(self, decoder: Decoder, config: ModelConfig, backend, stored: torch.dtype) -> None:
        self.decoder, self.backend = decoder, backend
        self.table = ReqToTokenPool(3, SLOTS, CPU)
        self.cache = KVCache(
            num_slots=SLOTS,
            num_layers=LAYERS,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
            dtype=stored,
            device=CPU,
        )
        order = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(2))
        self.slots = order[: SLOTS // 3 * 3].view(3, -1)
        self.lengths = [0, 0, 0]

    def step(self, new: list[int], seed: int, deepstack: int) -> torch.Tensor:
        """Hidden states behind random ids of each request, in random places, with `deepstack` layers of additions."""
        generator = torch.Generator().manual_seed(seed)
        rows = [row for row in range(3) if new[row]]
        for row in rows:
            self.table.write(row, self.lengths[row], self.slots[row, self.lengths[row] : self.lengths[row] + new[row]])
        count = sum(new)
        batch = forward_batch(
            self.backend,
            self.table,
            self.cache,
            rows,
            [(self.lengths[row], new[row]) for row in rows],
            forward_mode=ForwardMode.MIXED,
            input_ids=torch.randint(0, 50, (count,), generator=generator),
            positions=torch.randint(0, 300, (3, count), generator=generator),
        )
        self.lengths = [length + more for length, more in zip(self.lengths, new, strict=True)]
        self.backend.init_forward_metadata(batch)
        embeds = self.decoder.embed_tokens(batch.input_ids)
        index = torch.randperm(count, generator=generator)[: count // 2]
        added = torch.randn((deepstack, len(index), embeds.shape[1]), generator=generator).to(embeds.dtype)
        return self.decoder(embeds, batch.positions, batch, index if deepstack else None, added if deepstack else None)


@SHAPES
@torch.inference_mode()
@given(
    family=st.sampled_from([(Qwen2Decoder, False), (Qwen3Decoder, False), (Qwen3Decoder, True)]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    mode=st.sampled_from([None, "int8", "int4"]),
    stored=st.sampled_from([None, torch.float8_e4m3fn, torch.int8]),
    heads=st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    head_dim=st.sampled_from([32, 64]),
    hidden_size=st.sampled_from([64, 72, 200]),
    intermediate_size=st.sampled_from([40, 96, 600]),
    experts=st.sampled_from(
        [
            None,
            ExpertsConfig(count=5, chosen=2, intermediate_size=40, sparse_layers=frozenset(range(LAYERS))),
            ExpertsConfig(count=3, chosen=3, intermediate_size=96, sparse_layers=frozenset((1,))),
        ]
    ),
    act=st.sampled_from(["silu", "gelu_pytorch_tanh"]),
    deepstack=st.integers(0, LAYERS),
    steps=STEPS,
)
def test_whole_layers_compute_what_one_by_one_does(
    family, dtype, mode, stored, heads, head_dim, hidden_size, intermediate_size, experts, act, deepstack, steps
):
    kind, bias = family
    config = make_config(
        num_layers=LAYERS,
        num_heads=heads[0],
        num_kv_heads=heads[1],
        head_dim=head_dim,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        experts=experts,
        hidden_act=act,
        attention_bias=bias,
        mrope_section={32: (6, 5, 5), 64: (12, 10, 10)}[head_dim],
    )
    decoder = make_decoder(kind, config, dtype, mode)
    ours, reference = (Runner(decoder, config, backend, stored or dtype) for backend in (Counting(), OneByOne()))
    for seed, new in enumerate(steps):
        made, wanted = (runner.step(new, seed, deepstack) for runner in (ours, reference))
        assert made.isfinite().all()
        assert torch.equal(made, wanted)
    assert ours.backend.layers == 0
    for a, b in zip(ours.cache.layers, reference.cache.layers, strict=True):
        for field in dataclasses.fields(a):
            left, right = getattr(a, field.name), getattr(b, field.name)
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left.view(torch.uint8), right.view(torch.uint8))


@torch.inference_mode()
@pytest.mark.parametrize(
    "odd",  # the last product's inputs come in pairs
    [
        {"intermediate_size": 97},
        {"experts": ExpertsConfig(count=3, chosen=2, intermediate_size=41, sparse_layers=frozenset((2,)))},
    ],
)
def test_what_is_not_packed_goes_one_by_one(odd):
    config = make_config(num_layers=LAYERS, **odd)
    decoder = make_decoder(Qwen3Decoder, config, torch.float32)
    backend = Counting()
    ours = Runner(decoder, config, backend, torch.float32)
    reference = Runner(decoder, config, TorchAttentionBackend(), torch.float32)
    torch.testing.assert_close(ours.step([9, 0, 1], 0, 1), reference.step([9, 0, 1], 0, 1), rtol=1e-4, atol=1e-4)
    assert backend.layers == LAYERS
