"""Lines that strangers cause do not fill the log."""

from __future__ import annotations

import logging

from vlmserve.api.http_server import OnceInAWhile


def test_a_line_comes_once_and_the_next_one_counts() -> None:
    now, seen = 0.0, []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append(record.getMessage())
    log = logging.Logger("log")
    log.addHandler(handler)
    log.addFilter(OnceInAWhile(10, clock=lambda: now))
    for second in range(25):
        now = second
        for number in range(3):
            log.warning("socket.accept() failed\nsocket: %d", number)
        log.warning("other %d", second)
    assert [line.partition("\n")[0] for line in seen if "accept" in line] == ["socket.accept() failed"] * 3
    assert [line.rpartition(" (")[2] for line in seen if "accept" in line][1:] == [
        "29 more such lines were left out)"
    ] * 2
    assert [line.partition(" (")[0] for line in seen if "other" in line] == ["other 0", "other 10", "other 20"]
