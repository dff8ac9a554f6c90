"""Graphs that hold collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from vlmserve_common.compute.graphs import Capturer, Graph

if TYPE_CHECKING:
    from vlmserve_common.parallel.group import ProcessGroup


class CountingCapturer:
    """A `Capturer` whose graphs count their recorded collectives in the group at each replay. No Python runs then that
    could count them."""

    def __init__(self, capturer: Capturer, group: ProcessGroup) -> None:
        self._capturer, self._group = capturer, group

    def capture(self, run: Callable[[], None]) -> Graph:
        """See `Capturer`."""
        group = self._group
        counts, sizes = Counter[str](), Counter[str]()

        def counted() -> None:
            nonlocal counts, sizes
            before = group.counts.copy(), group.bytes.copy()
            run()
            counts, sizes = group.counts - before[0], group.bytes - before[1]

        graph = self._capturer.capture(counted)
        # the last ones were recorded, and not done
        group.counts.subtract(counts)
        group.bytes.subtract(sizes)
        counting = _Counted(graph, group, counts, sizes)
        group.outlives(counting)
        return counting


class _Counted:
    def __init__(self, graph: Graph, group: ProcessGroup, counts: Counter[str], sizes: Counter[str]) -> None:
        self._graph: Graph | None = graph
        self._group, self._counts, self._sizes = group, counts, sizes

    def drop(self) -> None:
        """See `Captured`."""
        self._graph = None

    def replay(self) -> None:
        """See `Graph`."""
        assert self._graph is not None, "the group is closed"
        self._graph.replay()
        self._group.counts.update(self._counts)
        self._group.bytes.update(self._sizes)
