"""Orders that are taken before their turn: whoever gives them goes on meanwhile."""

from __future__ import annotations

import queue
import threading

from vlmserve_common.parallel.group import Orders


class TakenAhead:
    """Takes orders in a thread of its own. Giving one waits until all have taken it, and a stage of a pipeline is to
    go on with the next step while a later stage computes this one."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._taken: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()
        threading.Thread(target=self._take_all, name="orders", daemon=True).start()

    def take(self) -> bytes:
        """See `Orders.take`."""
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
