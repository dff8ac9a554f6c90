"""Operators of several residual streams, one token of delta nets, and experts with one for all, against others."""

from types import SimpleNamespace

import pytest
import torch

from tests.tiny_checkpoints import HYBRID, HYBRID_MOE, STREAMED, make_checkpoint
from vlmserve.engine.recurrent import state_shape
from vlmserve.memory.recurrent_cache import RecurrentCache, RecurrentStep, Span
from vlmserve.models.qwen4_exp.streams import HyperConnection
from vlmserve.models.registry import load_model
from vlmserve_common.compute.experts import SparseMLP
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.kernels import library

DTYPES = [torch.float32, torch.bfloat16]
# of bfloat16, torch rounds in between
CLOSE = {torch.float32: {"rtol": 1e-5, "atol": 1e-5}, torch.bfloat16: {"rtol": 3e-2, "atol": 3e-2}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {family: make_checkpoint(family, tmp_path_factory.mktemp(family)) for family in (HYBRID, STREAMED)}


@pytest.fixture
def both():
    """Calls a function with torch's operators and then with the library's."""

    def run(function):
        library.activate("off", threads=1)
        wanted = function()
        library.activate("auto", threads=2)
        assert library.active() is not None
        return wanted, function()

    yield run
    library.activate("off", threads=1)


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (70, 64), (3, 72)])
def test_streams(folders, both, dtype, tokens, hidden):
    config = load_model(folders[STREAMED]).config
    generator = torch.Generator().manual_seed(1)
    config = SimpleNamespace(
        streams=config.streams, stream_size=4 * hidden, hidden_size=hidden, rms_norm_eps=config.rms_norm_eps
    )
    connection = HyperConnection(config)
    for parameter in connection.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * (0.3 if parameter.ndim == 1 else 0.1))
    connection.to(dtype)
    x, made = (torch.randn(tokens, size, generator=generator).to(dtype) for size in (4 * hidden, hidden))

    def run():
        mixed, logits = connection.read(x)
        return mixed, connection.write(x, made, logits)

    wanted, apart = both(run)
    pack_linears(connection)
    assert connection._native(x) is not None
    for got in (apart, run()):
        for one, other in zip(got, wanted, strict=True):
            assert one.dtype == dtype
            torch.testing.assert_close(one, other, **CLOSE[dtype])
        assert (got[1] - x).abs().max() > 0.1


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", [HYBRID, STREAMED])
@pytest.mark.parametrize("beside", [False, True])
def test_one_token_of_delta_nets(folders, both, dtype, family, beside):
    """Requests with one token each, alone and beside one with several."""
    model = load_model(folders[family], dtype=dtype)
    net = next(layer.linear_attn for layer in reversed(model.language_model.layers) if layer.linear_attn is not None)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, model.config.hidden_size, generator=generator).to(dtype)
    states, tokens = torch.tensor([3, 1, 4]), torch.tensor([0, 5, 6])
    shape = state_shape(model.config, dtype)

    def run():
        cache = RecurrentCache(5, shape, torch.device("cpu"))
        filled = torch.Generator().manual_seed(3)
        for part in (cache.conv, cache.recurrent):
            part.copy_(torch.randn(part.shape, generator=filled))
        spans = (Span(start=1, length=4, prefix_len=0, state=2),) if beside else ()
        step = RecurrentStep(cache=cache, spans=spans, single_states=states, single_tokens=tokens if beside else None)
        rows = x if beside else x[tokens]
        return net(rows, SimpleNamespace(recurrent=step)), cache.conv, cache.recurrent

    wanted, got = both(run)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, **CLOSE[dtype])
    assert torch.equal(got[1][:, : net._index], wanted[1][:, : net._index]), "the other layers'"


@torch.inference_mode()
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 9])
def test_experts_with_one_for_all(tmp_path, dtype, tokens):
    """In one call as by one operator after the other."""
    library.activate("auto", threads=2)
    model = load_model(make_checkpoint(HYBRID_MOE, tmp_path), dtype=dtype)
    model.pack()
    mlp = model.language_model.layers[0].mlp
    x, residual = torch.randn(2, tokens, model.config.hidden_size, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert mlp._native() is not None
    whole = mlp(x), mlp(x, residual)
    apart = SparseMLP.forward(mlp, x), SparseMLP.forward(mlp, x, residual)
    for one, other in zip(whole, apart, strict=True):
        torch.testing.assert_close(one, other, **CLOSE[dtype])
    library.activate("off", threads=1)
