"""Embeddings on their way from a GPU to the host's memory, asked for in one thread and copied in another."""

from __future__ import annotations

import torch


class HostCopy:
    """Keeps embeddings, from any device, until `take`. Making one never waits for the device.

    Written by torch's documentation; it has not been run on a GPU.
    """

    def __init__(self, embeds: torch.Tensor) -> None:
        self.nbytes = embeds.nbytes
        self._embeds = embeds
        self._computed: torch.cuda.Event | None = None
        if embeds.is_cuda:
            self._computed = torch.cuda.Event()
            self._computed.record(torch.cuda.current_stream(embeds.device))

    def take(self) -> torch.Tensor:
        """The embeddings on the CPU; blocks until they are there. In any thread."""
        if self._computed is None:
            return self._embeds
        # a stream of its own: behind what computed them, and behind nothing that was asked for since
        stream = torch.cuda.Stream(self._embeds.device)
        with torch.cuda.stream(stream):
            stream.wait_event(self._computed)
            return self._embeds.cpu()
