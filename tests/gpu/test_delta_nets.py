"""Gated delta nets by the kernels of the GPU against torch's, in the shapes of real models."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from tests.vlmserve_common.kernels.paged_step import off
from vlmserve.memory.recurrent_cache import (
    GuessCache,
    GuessedTokens,
    RecurrentCache,
    RecurrentStep,
    Span,
    StateShape,
)
from vlmserve.models.config import LinearAttentionConfig
from vlmserve.models.delta_net import GatedDeltaNet
from vlmserve_common.compute.communicator import ALONE
from vlmserve_common.compute.graphs import CudaCapturer
from vlmserve_common.kernels import fused

ROUNDING = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 0.03}
HIDDEN, STATES, GUESSES = 256, 8, 4


class Net:
    """A net, and states that are all set."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        heads, dim = ((16, 48), 128) if device.type == "cuda" else ((1, 2), 16)
        sizes = LinearAttentionConfig(
            layers=frozenset({0}),
            num_key_heads=heads[0],
            num_value_heads=heads[1],
            key_dim=dim,
            value_dim=dim,
            conv_width=4,
        )
        torch.manual_seed(0)
        config = SimpleNamespace(hidden_size=HIDDEN, rms_norm_eps=1e-6)
        self.net = GatedDeltaNet(config, ALONE, sizes, 0).to(device, dtype)
        for parameter in self.net.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)
        shape = StateShape(conv=(1, 3, sizes.conv_size), recurrent=(1, heads[1], dim, dim), conv_dtype=dtype)
        self.cache = RecurrentCache(STATES, shape, device, padded=True)
        self.cache.guesses = GuessCache(STATES, GUESSES, shape, device)
        self.cache.conv.normal_()
        self.cache.recurrent.normal_(0, 0.1)
        self._begun = [part.clone() for part in (self.cache.conv, self.cache.recurrent)]
        self._device, self._dtype = device, dtype

    def __call__(self, tokens: int, **step: object) -> torch.Tensor:
        """What comes out of a step behind the same states every time, and the states behind it."""
        for part, begun in zip((self.cache.conv, self.cache.recurrent), self._begun, strict=True):
            part.copy_(begun)
        x = torch.randn(tokens, HIDDEN, generator=torch.Generator().manual_seed(1)).to(self._device, self._dtype)
        found = self.net(x, SimpleNamespace(recurrent=RecurrentStep(cache=self.cache, **({"spans": ()} | step))))
        return torch.cat((found.flatten().float(), self.cache.recurrent.flatten()))


def by_both(net: Net, device: torch.device, run) -> float:
    """How far the kernels are off torch's, as a part of the length."""
    made = []
    for choice in ("triton", "torch"):
        fused.activate(choice, device)
        with torch.inference_mode():
            made.append(run(net))
    return off(*made)


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_prompts(device, dtype):
    lengths = (2048, 300, 7) if device.type == "cuda" else (70, 9)
    spans = [
        Span(start=sum(lengths[:number]), length=length, prefix_len=40 * number, state=1 + number)
        for number, length in enumerate(lengths)
    ]
    net = Net(device, dtype)
    assert by_both(net, device, lambda net: net(sum(lengths), spans=tuple(spans))) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_single_tokens(device, dtype):
    states = torch.tensor([3, 1, 5, 2], device=device)
    net = Net(device, dtype)
    assert by_both(net, device, lambda net: net(4, single_states=states)) <= ROUNDING[dtype]
    tokens = torch.tensor([4, 0, 2, 1], device=device)
    # the rows between are of nobody
    run = lambda net: net(5, single_states=states, single_tokens=tokens)[HIDDEN * 5 :]  # noqa: E731
    assert by_both(net, device, run) <= ROUNDING[dtype]


@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
def test_guesses(device, dtype):
    """The states behind the right ones, and one on the way."""
    tokens = torch.arange(2 * GUESSES, device=device).view(2, GUESSES)
    guessed = GuessedTokens(
        tokens=tokens, states=torch.tensor([4, 2], device=device), rows=torch.tensor([0, 5], device=device)
    )
    jobs = torch.tensor([(4, 0, 3, 4), (4, 0, 1, 7), (2, 5, 4, 2)], device=device).T.contiguous().unbind()

    def run(net: Net) -> torch.Tensor:
        out = net(2 * GUESSES, guessed=(guessed,))
        net.cache.advance(*jobs)
        return torch.cat((out, net.cache.recurrent.flatten()))

    assert by_both(Net(device, dtype), device, run) <= ROUNDING[dtype]


def test_a_captured_step_is_replayed_with_other_states(cuda):
    net = Net(cuda, torch.bfloat16)
    fused.activate("triton", cuda)
    states, x = torch.tensor([3, 1, 9, 9], device=cuda), torch.zeros(4, HIDDEN, dtype=torch.bfloat16, device=cuda)
    out, step = torch.zeros_like(x), RecurrentStep(cache=net.cache, spans=(), single_states=states)
    with torch.inference_mode():
        graph = CudaCapturer(cuda).capture(lambda: out.copy_(net.net(x, SimpleNamespace(recurrent=step))))
        x.normal_()
        states.copy_(torch.tensor([2, 5, 9, 9]))
        begun = [part.clone() for part in (net.cache.conv, net.cache.recurrent)]
        graph.replay()
        found, behind = out.clone(), net.cache.recurrent[:9].clone()
        for part, before in zip((net.cache.conv, net.cache.recurrent), begun, strict=True):
            part.copy_(before)
        wanted = net.net(x, SimpleNamespace(recurrent=step))
    assert torch.equal(found[:2], wanted[:2])
    assert torch.equal(behind, net.cache.recurrent[:9])
