"""What a CUDA capture does, and in which order; tests/gpu has what comes of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from vlmserve_common.compute import graphs


def test_warm_up_comes_before_the_capture_and_all_share_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[object] = []
    current = ["main"]

    class Stream(SimpleNamespace):
        def wait_stream(self, other: Stream) -> None:
            done.append(f"{self.name} waits for {other.name}")

    @contextlib.contextmanager
    def stream(chosen: Stream) -> Iterator[None]:
        before = current[0]
        current[0] = chosen.name
        try:
            yield
        finally:
            current[0] = before

    @contextlib.contextmanager
    def graph(_: object, *, pool: str, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        before = current[0]
        current[0] = f"graph in {pool} on {stream.name}"
        yield  # and does not come back where that raises
        current[0] = before

    fake = SimpleNamespace(
        Stream=lambda device: Stream(name="side"),
        current_stream=lambda: Stream(name=current[0]),
        graph_pool_handle=lambda: "a pool",
        device=lambda device: contextlib.nullcontext(),
        stream=stream,
        CUDAGraph=SimpleNamespace,
        graph=graph,
    )
    monkeypatch.setattr(graphs.torch, "cuda", fake)
    capturer = graphs.CudaCapturer(torch.device("cuda:0"))
    for _ in range(2):
        done.clear()
        assert isinstance(capturer.capture(lambda: done.append(current[0])), SimpleNamespace)
        assert done == [
            "side waits for main",
            "side",
            "side",
            "main waits for side",
            "graph in a pool on side",
        ]

    def fails() -> None:
        if current[0].startswith("graph"):
            raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        capturer.capture(fails)
    assert current == ["main"]
