"""Grammars of the fake worker's tokens, which are compiled when a test says so."""

from __future__ import annotations

from concurrent.futures import Future

import numpy as np

from tests.vlmserve.scheduler import fake_worker as fake
from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar.matcher import Patience, Proposal
from vlmserve_common.errors import BadRequestError

BAD = "bad"
LENGTH = 5
ENDS = f"7 {LENGTH}"


def spec(text: str, **more: str) -> GrammarSpec:
    return GrammarSpec(kind="regex", text=text, **more)


class FakeMatcher:
    """The text is two numbers: tokens are allowed unless their sum with all before is a multiple of the first, and the
    second, if there is one, is where the answer is over."""

    def __init__(self, grammar: GrammarSpec) -> None:
        divisor, *ends = map(int, grammar.text.split())
        self._divisor, self._end = divisor, ends[0] if ends else None
        self._sum = 0
        self._count = 0
        self.grammar = self
        self.failure = ""
        self.guesses: tuple[int, ...] = ()
        self._masks: list[np.ndarray] = []
        self._asked: Proposal = ((), 0)

    @property
    def is_over(self) -> bool:
        return self._count == self._end

    def mask(self, ahead: int) -> np.ndarray | None:
        return self._masks[ahead] if self._masks else None

    def next_mask(self) -> np.ndarray:
        bits = [(self._sum + token) % self._divisor != 0 for token in range(fake.VOCAB)]
        bits += [False] * (-len(bits) % 32)
        return np.packbits(bits, bitorder="little").view(np.int32)

    words = -(-fake.VOCAB // 32)

    def ask(self, matchers: dict[FakeMatcher, Proposal]) -> None:
        self._asked = matchers[self]

    def take_masks(self, matchers: dict[FakeMatcher, Proposal]) -> None:
        """The proposals that fit, and masks of the tokens behind them."""
        kept, (proposed, most) = (self._sum, self._count), self._asked
        self._masks, guesses = [self.next_mask()], list[int]()
        for guess in proposed[:most]:
            if self._count + 1 == self._end or not self._allows(guess):
                break
            guesses.append(guess)
            self._sum, self._count = self._sum + guess, self._count + 1
            self._masks.append(self.next_mask())
        self.guesses, (self._sum, self._count) = tuple(guesses), kept

    def _allows(self, token: int) -> bool:
        return bool(self.next_mask()[token // 32] >> token % 32 & 1)

    def accept(self, token: int) -> None:
        assert self._allows(token)
        self._sum += token
        self._count += 1
        self._masks, self.guesses = [], ()

    def end(self) -> None:
        pass


class _Compiled:
    def __init__(self, grammar: GrammarSpec) -> None:
        self._grammar = grammar

    def matcher(self, _: Patience) -> FakeMatcher:
        return FakeMatcher(self._grammar)


class FakeGrammars:
    def __init__(self) -> None:
        self.waiting: list[tuple[GrammarSpec, Future]] = []
        self.held = 0

    def get(self, grammar: GrammarSpec, client: str) -> Future:
        self.held += 1
        future: Future = Future()
        self.waiting.append((grammar, future))
        return future

    def release(self, grammar: GrammarSpec) -> None:
        self.held -= 1

    def finish(self) -> bool:
        """Compile the newest; whether there was one."""
        if not self.waiting:
            return False
        grammar, future = self.waiting.pop()
        if grammar.text == BAD:
            future.set_exception(BadRequestError("cannot be compiled"))
        else:
            future.set_result(_Compiled(grammar))
        return True

    def close(self) -> None:
        pass
