"""Signals that stop a command: the first one does, and what it has set going is done in full."""

from __future__ import annotations

import signal

from vlmserve_common.process.stop_signals import STOP_SIGNALS, StopRequested, stop_signals_raise


def test_later_signals_do_not_break_off_what_the_first_has_set_going() -> None:
    before = [signal.getsignal(number) for number in STOP_SIGNALS]
    done = []
    with stop_signals_raise():
        try:
            signal.raise_signal(signal.SIGINT)
        except StopRequested as stop:
            for number in STOP_SIGNALS:
                signal.raise_signal(number)
            done.append(str(stop))
    assert done == ["SIGINT"]
    assert [signal.getsignal(number) for number in STOP_SIGNALS] == before
