"""Children are ended in order if they can be, and by force if not."""

from __future__ import annotations

import ctypes
import os
import signal
import time

import pytest

from vlmserve_common.process.child import ChildProcess, Parent


def hold_the_interpreter(parent: Parent) -> None:
    """No other thread of the process gets on, not even the one that would end it."""
    parent.ready({})
    ctypes.PyDLL(None).sleep(1000)


def sleep(parent: Parent) -> None:
    parent.ready({})
    time.sleep(1000)


@pytest.mark.parametrize(
    ("main", "stopped", "killed"), [(sleep, False, False), (sleep, True, False), (hold_the_interpreter, False, True)]
)
def test_a_child_is_ended(main, stopped, killed, caplog):
    child = ChildProcess("c", main, (), title="the child", log_level="info", stop_patience_s=5 if not killed else 0.2)
    pid = child.pid
    child.take_report()
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    child.stop()
    assert ("the child does not stop: killing it" in caplog.text) == killed
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
