"""A device that is as late as can be: nothing is computed before its result is waited for, and then in order."""

from __future__ import annotations

from collections import deque

from vlmserve.executor.device_queue import DeviceQueue


class Lazy:
    def __init__(self, owner: LazyQueue, run, args) -> None:
        self.owner, self._run, self._args = owner, run, args
        self.done = None

    def compute(self) -> None:
        self.done = DeviceQueue().submit(self._run, *self._args)

    def result(self):
        while self.done is None:
            self.owner.waiting.popleft().compute()
        return self.done.result()


class LazyQueue:
    work = Lazy

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.least_reqs = depth
        self.waiting: deque[Lazy] = deque()

    def submit(self, run, *args) -> Lazy:
        work = self.work(self, run, args)
        self.waiting.append(work)
        return work

    def here(self, run, *args):
        assert not self.waiting, "what was submitted has to be waited for before"
        return DeviceQueue().submit(run, *args)

    def close(self) -> None:
        while self.waiting:
            self.waiting.popleft().compute()
