"""Children are ended in order if they can be, and by force if not."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from vlmserve_common.errors import CheckpointError, EngineError, SettingsError
from vlmserve_common.process.child import ChildProcess, Parent


def hold_the_interpreter(parent: Parent, fifo: Path) -> None:
    """From the byte on that it writes, no other thread of the process gets on, not even the one that would end it."""
    parent.ready({})
    hold_while_starting(parent, fifo)


def hold_while_starting(parent: Parent, fifo: Path) -> None:
    to = os.open(fifo, os.O_WRONLY)
    library = ctypes.PyDLL(None)  # whose calls keep the interpreter's lock
    sys.setswitchinterval(1000)
    library.write(to, b"!", 1)
    library.sleep(1000)


def sleep(parent: Parent, fifo: Path) -> None:
    parent.ready({})
    fifo.write_bytes(b"!")
    time.sleep(1000)


@pytest.mark.parametrize(
    ("main", "stopped", "killed"), [(sleep, False, False), (sleep, True, False), (hold_the_interpreter, False, True)]
)
def test_a_child_is_ended(tmp_path, main, stopped, killed, caplog):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    patience = 0.2 if killed else 20
    child = ChildProcess("c", main, (fifo,), title="the child", log_level="info", stop_patience_s=patience)
    pid = child.pid
    child.take_report()
    with fifo.open("rb") as waiting:
        assert waiting.read(1) == b"!"
    if stopped:
        os.kill(pid, signal.SIGSTOP)
    child.stop()
    assert ("the child does not stop: killing it" in caplog.text) == killed
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def refuse(parent: Parent, error: Exception) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "raised"),
    [(CheckpointError("no weights"), SettingsError), (EngineError("no GPU"), EngineError), (OSError("x"), EngineError)],
)
def test_what_the_user_has_to_change_is_told_from_other_failures(error: Exception, raised: type[Exception]) -> None:
    child = ChildProcess("c", refuse, (error,), title="the child", log_level="info", stop_patience_s=1.0)
    with pytest.raises(raised, match=str(error)) as caught:
        child.take_report()
    assert type(caught.value) is raised
    child.stop()


def test_a_child_that_was_still_starting_is_ended_without_a_word(tmp_path, caplog):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    child = ChildProcess("c", hold_while_starting, (fifo,), title="the child", log_level="info", stop_patience_s=0.2)
    with fifo.open("rb") as waiting:
        assert waiting.read(1) == b"!"
    child.stop()
    assert not caplog.text
    with pytest.raises(ProcessLookupError):
        os.kill(child.pid, 0)
