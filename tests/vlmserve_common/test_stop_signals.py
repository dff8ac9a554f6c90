"""Signals that stop a command: the first one does, and what it has set going is done in full."""

from __future__ import annotations

import asyncio
import signal
import threading
import weakref

import pytest

from vlmserve_common.process.stop_signals import STOP_SIGNALS, StopRequested, made_whole, stop_signals_raise


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


@pytest.mark.parametrize("another", [False, True])
def test_a_signal_in_a_weak_reference_s_callback_is_not_lost(another: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another one may come before Python has told that the first one was passed over."""
    if another:
        start = threading.Timer.start

        def start_and_signal(timer: threading.Timer) -> None:
            start(timer)
            signal.raise_signal(signal.SIGINT)

        monkeypatch.setattr(threading.Timer, "start", start_and_signal)

    class Thing:
        pass

    def wait() -> None:
        thing = Thing()
        reference = weakref.ref(thing, lambda _: signal.raise_signal(signal.SIGTERM))
        del thing
        assert reference() is None
        signal.pause()

    with stop_signals_raise(), pytest.raises(StopRequested, match="SIGTERM"):
        wait()


def test_a_signal_in_a_callback_of_an_event_loop_is_not_lost() -> None:
    async def wait() -> None:
        asyncio.get_running_loop().call_soon(signal.raise_signal, signal.SIGTERM)
        await asyncio.Event().wait()

    with stop_signals_raise(), pytest.raises(StopRequested):
        asyncio.run(wait())


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_what_must_be_made_whole_is(number: signal.Signals) -> None:
    made = []

    def make() -> str:
        made.append("half")
        signal.raise_signal(number)
        made.append("whole")
        return "it"

    with stop_signals_raise(), pytest.raises(StopRequested):
        made_whole(make)
    assert made == ["half", "whole"]
    assert made_whole(lambda: "it") == "it"
