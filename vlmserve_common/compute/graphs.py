"""Work that is recorded once and then launched as a whole: CUDA graphs, behind an interface that a test can fake."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

_WARM_UPS = 2


class Graph(Protocol):
    """Something recorded."""

    def replay(self) -> None:
        """Repeat the recorded work, on the same memory."""


class Capturer(Protocol):
    """Records graphs that share one pool of memory for everything between their inputs and outputs.

    So only one of them may run at a time. The largest is best captured first: the other graphs then fit into its
    memory.
    """

    def capture(self, run: Callable[[], None]) -> Graph:
        """Record the work that `run` launches. `run` is called a few times, the last time to be recorded. It may read
        and write tensors that outlive the graph, and those it makes itself. It may neither wait for the device, nor
        decide by values on it: RuntimeError, as when memory is short."""


class CudaCapturer(Capturer):
    """Records on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> Graph:
        with torch.cuda.device(self._device):
            # kernels are compiled, and libraries take their workspaces, at the first run: no capture may hold that
            self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                for _ in range(_WARM_UPS):
                    run()
            current = torch.cuda.current_stream()
            current.wait_stream(self._stream)
            graph = torch.cuda.CUDAGraph()
            recording = torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=self._stream,
                # what other threads do meanwhile is not in it, and may be done: NCCL has one that asks for events
                capture_error_mode="thread_local",
            )
            # twice, because a capture that fails does not come back from its stream by itself
            with torch.cuda.stream(current), recording:
                run()
        return graph
