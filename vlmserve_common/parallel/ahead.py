"""Takes orders ahead of time, so that the rank that gives them does not wait."""

from __future__ import annotations

import queue
import threading

from vlmserve_common.parallel.group import Orders


class TakenAhead:
    """Takes orders in a thread of its own. Giving an order waits until all ranks have taken it; this lets a stage of a
    pipeline begin the next step while a later stage computes."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._taken: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._take_all, name="orders", daemon=True).start()

    def take(self) -> bytes:
        """Return the next order; wait for it."""
        taken = self._taken.get()
        if isinstance(taken, Exception):
            raise taken
        return taken

    def _take_all(self) -> None:
        try:
            while True:
                self._taken.put(self._orders.take())
        except Exception as error:  # whatever it is: who takes orders would wait for good
            self._taken.put(error)
