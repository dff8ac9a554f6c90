"""Rows on their way from a GPU to the host's memory, asked for in one thread and copied in another."""

from __future__ import annotations

import torch


class HostCopy:
    """Keeps rows, from any device, until `take`. Making one never waits for the device.

    Written by torch's documentation; it has not been run on a GPU.
    """

    def __init__(self, rows: torch.Tensor) -> None:
        self.nbytes = rows.nbytes
        self._rows = rows
        self._computed: torch.cuda.Event | None = None
        if rows.is_cuda:
            self._computed = torch.cuda.Event()
            self._computed.record(torch.cuda.current_stream(rows.device))

    def take(self) -> torch.Tensor:
        """The rows on the CPU; blocks until they are there. In any thread."""
        if self._computed is None:
            return self._rows
        # a stream of its own: behind what computed the rows, and behind nothing that was asked for since
        stream = torch.cuda.Stream(self._rows.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            return self._rows.cpu()
