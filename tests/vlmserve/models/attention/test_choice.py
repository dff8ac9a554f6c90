"""Which backend a server gets, with candidates that are not there, cannot be built, or compute nonsense."""

from __future__ import annotations

import dataclasses
import logging
import sys

import pytest
import torch

from tests.vlmserve.models.attention import fake_flashinfer
from tests.vlmserve.models.attention.test_flashinfer_backend import SPEC
from vlmserve.models.attention import choice
from vlmserve.models.attention.choice import Candidate, choose_backend, try_candidate
from vlmserve.models.attention.flashinfer_backend import FlashInferAttentionBackend
from vlmserve.models.attention.native_backend import NativeAttentionBackend
from vlmserve.models.attention.torch_backend import TorchAttentionBackend
from vlmserve_common.errors import EngineError
from vlmserve_common.installing import install
from vlmserve_common.kernels import attention as kernels

CUDA = dataclasses.replace(SPEC, device=torch.device("cuda:0"))
NINJA = "Ninja build failed. Ninja output:\n[1/3] nvcc -c a.cu\na.cu(7): error: no operator\nninja: build stopped"


class CompilationError(Exception):
    """As Triton has it."""


class _Wrong(TorchAttentionBackend):
    def forward(self, *words):
        return super().forward(*words).roll(1, dims=0)


class _NotANumber(TorchAttentionBackend):
    def forward(self, *words):
        return super().forward(*words) * torch.nan


def _raises(error):
    def make(spec):
        raise error

    return make


def candidate(name, make, **more):
    return Candidate(name=name, make=make, **more)


@pytest.fixture
def on_a_gpu(monkeypatch):
    """A GPU that computes on the CPU, and can be broken."""
    broken = []

    def synchronize(device):
        if broken:
            raise broken[0]

    real = choice.run_trial
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(choice, "run_trial", lambda backend, spec: real(backend, SPEC))
    return broken


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (
            _raises(ModuleNotFoundError("No module named 'flashinfer'", name="flashinfer")),
            install("gpu"),
        ),
        (_raises(ImportError("libcudart.so.13\nmore")), "ImportError: libcudart.so.13"),
        (_raises(RuntimeError("Failed to find C compiler. Please specify via CC environment variable.")), "set CC"),
        (_raises(RuntimeError("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist")), "toolkit"),
        (
            _raises(RuntimeError("Ninja build failed. Ninja output:\n/bin/sh: 1: /usr/local/cuda/bin/nvcc: not found")),
            "toolkit",
        ),
        (_raises(RuntimeError(NINJA)), "its kernels cannot be built: a.cu(7): error: no operator"),
        (_raises(RuntimeError("")), "RuntimeError: no reason given"),
        (_raises(CompilationError("at 1:0:\ndef kernel(\n^\nno such type")), "CompilationError: no such type"),
        (lambda spec: _Wrong(), "its trial gave wrong answers"),
        (lambda spec: _NotANumber(), "its trial gave wrong answers (off by nan"),
    ],
)
def test_what_is_passed_over_is_told_in_one_line(make, why, on_a_gpu, caplog):
    second = candidate("second", lambda spec: TorchAttentionBackend())
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        backend = choose_backend("auto", CUDA, [candidate("first", make), second])
    assert type(backend) is TorchAttentionBackend
    [line] = [record.getMessage() for record in caplog.records]
    assert line.startswith("attention by second (not first: ")
    assert why in line
    assert "\n" not in line


def test_what_cannot_be_is_not_made(on_a_gpu, caplog):
    first = candidate("first", _raises(AssertionError("made")), lacks=lambda spec: "it has no such heads")
    with caplog.at_level(logging.INFO, logger=choice.__name__):
        assert isinstance(choose_backend("auto", CUDA, [first]), TorchAttentionBackend)
    assert caplog.messages == ["attention by torch, which is slow on a GPU (not first: it has no such heads)"]


def test_the_first_that_passes_is_taken_and_none_after_it_is_tried(on_a_gpu):
    made = []

    def make(spec):
        made.append(TorchAttentionBackend())
        return made[0]

    assert (
        choose_backend("auto", CUDA, [candidate("first", make), candidate("second", _raises(ValueError()))]) is made[0]
    )
    assert isinstance(choose_backend("torch", CUDA, [candidate("first", make)]), TorchAttentionBackend)
    assert len(made) == 1


def test_what_was_asked_for_and_cannot_be_ends_the_start(on_a_gpu):
    first = candidate("triton", _raises(RuntimeError("no reason at all\nand more")))
    with pytest.raises(
        EngineError,
        match=r"^--attention-backend triton cannot be used here: RuntimeError: no reason at all; auto takes the best",
    ):
        choose_backend("triton", CUDA, [first])


def test_a_trial_that_breaks_the_gpu_ends_the_start(on_a_gpu):
    on_a_gpu.append(RuntimeError("CUDA error: an illegal memory access was encountered\nmore"))
    with pytest.raises(EngineError, match=r"by first broke .* cuda:0 \(CUDA error: an illegal .* encountered\): start"):
        choose_backend("auto", CUDA, [candidate("first", _raises(RuntimeError("illegal")))])


def test_on_a_cpu(monkeypatch):
    half = dataclasses.replace(SPEC, dtype=torch.float16)
    assert isinstance(choose_backend("auto", half), TorchAttentionBackend)
    with pytest.raises(EngineError, match=r"--attention-backend native needs .* here it is cpu, float16 and 64"):
        choose_backend("native", half)
    with pytest.raises(EngineError, match=r"^--attention-backend flashinfer is for GPUs, and the model is on cpu; for"):
        choose_backend("flashinfer", half)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(EngineError, match=r"^--attention-backend triton is for GPUs"):
        choose_backend("triton", half)
    monkeypatch.setattr(kernels, "active", object)
    full = dataclasses.replace(SPEC, dtype=torch.float32, cache_dtype=torch.float32)
    assert isinstance(choose_backend("auto", full), NativeAttentionBackend)
    assert isinstance(choose_backend("torch", full), TorchAttentionBackend)


@pytest.mark.parametrize("page_size", [1, 3, 64])
@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_a_trial_passes_what_is_right(page_size, cache_dtype, monkeypatch):
    monkeypatch.setitem(sys.modules, "flashinfer", fake_flashinfer)
    about = dataclasses.replace(SPEC, dtype=torch.bfloat16, cache_dtype=cache_dtype, page_size=page_size)
    tried = try_candidate(choice.FLASHINFER, about)
    assert isinstance(tried.backend, FlashInferAttentionBackend), tried.why_not


def test_triton_reads_no_8_bit_floats_on_older_gpus(monkeypatch):
    eight = dataclasses.replace(CUDA, cache_dtype=torch.float8_e4m3fn)
    found = []
    for capability in ((8, 0), (8, 9)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, here=capability: here)
        found.append((choice.TRITON.lacks(eight), choice.TRITON.lacks(CUDA)))
    assert found == [
        ("it reads 8-bit floats from compute capability 8.9 on, and this GPU has 8.0", None),
        (None, None),
    ]


def test_flashinfer_is_not_here(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert "it computes in bfloat16" in (
        try_candidate(choice.FLASHINFER, dataclasses.replace(SPEC, dtype=torch.float32)).why_not or ""
    )
    missing = try_candidate(choice.FLASHINFER, SPEC)
    assert missing.why_not == f"flashinfer is not installed: {install('gpu')}"
    assert caplog.messages == [], "nothing is built"


@pytest.mark.parametrize("cache_dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_triton_passes_its_trial(cache_dtype, monkeypatch):
    """By its interpreter where there is no GPU."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    about = dataclasses.replace(SPEC, dtype=torch.bfloat16, cache_dtype=cache_dtype)
    assert type(choose_backend("triton", about)).__name__ == "TritonAttentionBackend"


def test_windows_are_for_torch_on_a_gpu(on_a_gpu):
    good = candidate("good", lambda spec: TorchAttentionBackend())
    windows = dataclasses.replace(CUDA, windows=True)
    assert try_candidate(good, CUDA).backend is not None
    assert try_candidate(good, windows).why_not == "it has no sliding windows"
    with pytest.raises(EngineError, match="good cannot be used here: it has no sliding windows"):
        choose_backend("good", windows, [good])
