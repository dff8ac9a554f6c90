"""Child processes that report when they are ready, die with their parent, and whose death is noticed.

Parent and child share one pipe. The child's first message in it is a report in JSON, "ready" or "error"; what follows,
either way, is theirs to agree on. End of file means to the child that the parent stopped it, or is gone itself, however
that came about; to the parent, that the child is gone. The child ignores SIGINT and SIGTERM, which terminals and
service managers send to the whole group: the parent decides when a child may go, after the running requests.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import logging
import multiprocessing
import os
import queue
import shutil
import signal
import socket
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from vlmserve_common.errors import CheckpointError, EngineError, SettingsError, VlmserveError
from vlmserve_common.logs import configure_logging
from vlmserve_common.process.stop_signals import ignore_stop_signals, stop_signals_held

logger = logging.getLogger(__name__)

STOP_PATIENCE_S = 2.0
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_LONGEST_TEMP_DIR_BYTES = 70  # a socket's path may have 107, and 32 follow


class ChildProcess:
    """A started child. Start it while `stop_signals_held`, in a thread that outlives it (the kernel takes that thread's
    end for the parent's death), and `stop` it whatever happens.

    name: its name in log lines, and for top. title: what errors call it ("the scheduler process"). main: its work,
    called as `main(parent, *args)` in a fresh interpreter, where it must be importable by name; it calls `parent.ready`
    once and never returns. stop_patience_s: the seconds it gets to end. forked: it is a fork of the process that
    `prepare_forks` starts, which takes milliseconds once that process has imported all. pipe: this end of the pipe.
    """

    def __init__(
        self,
        name: str,
        main: Callable[..., None],
        args: tuple[object, ...],
        *,
        title: str,
        log_level: str,
        stop_patience_s: float = STOP_PATIENCE_S,
        forked: bool = False,
    ) -> None:
        # neither is a fork of this process, which would take along its threads and sockets
        context = multiprocessing.get_context("forkserver" if forked else "spawn")
        self.name = name
        self.title = title
        self._stop_patience_s = stop_patience_s
        self._was_ready = False
        self.pipe, theirs = context.Pipe(duplex=True)
        parent_pid = None if forked else os.getpid()
        self._process = context.Process(  # type: ignore[attr-defined]
            target=_run_child, name=name, args=(name, main, args, theirs, log_level, parent_pid)
        )
        try:
            self._process.start()
        except BaseException as error:
            self.pipe.close()
            if forked and isinstance(error, (EOFError, ConnectionError)):
                raise EngineError(f"{title} cannot start: the process that it would be a fork of has ended") from error
            raise
        finally:
            theirs.close()
        self.pid: int = self._process.pid

    @property
    def sentinel(self) -> int:
        """A file descriptor that becomes readable when the child has died."""
        return self._process.sentinel

    @property
    def alive(self) -> bool:
        """Whether the child has not died yet. A process that has ended counts as dead before it was waited for."""
        return not wait([self.sentinel], timeout=0)

    @property
    def was_killed(self) -> bool:
        """Whether a child that has died was killed by SIGKILL, as the kernel does when memory is short."""
        return self.was_ended_by(signal.SIGKILL)

    def was_ended_by(self, number: signal.Signals) -> bool:
        """Whether a child that has died was ended by this signal."""
        self._process.join(timeout=1.0)
        return self._process.exitcode == -number

    def how_it_died(self) -> str:
        """One clause for a log line."""
        self._process.join(timeout=1.0)
        code = self._process.exitcode
        if code is None:
            return f"{self.title} closed its pipe"
        if code < 0:
            return f"{self.title} was killed by {signal.Signals(-code).name}"
        return f"{self.title} ended with status {code}"

    def take_report(self) -> dict[str, Any]:
        """What the child says of itself, once it is ready; blocks until then. EngineError or SettingsError
        with its own message if it cannot start."""
        try:
            report = json.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            hint = ", as the kernel does when memory runs out" if self.was_killed else ""
            raise EngineError(f"{self.how_it_died()} while starting{hint}") from None
        if "error" in report:
            raise (SettingsError if report["for_user"] else EngineError)(report["error"])
        self._was_ready = True
        return report["ready"]

    def hang_up(self) -> None:
        """Tell the child to end, from any thread; threads that read from the pipe or write to it here are woken."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self.pipe.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child, unless it has died."""
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End the child by force, from any thread; it is still to be stopped."""
        with contextlib.suppress(ValueError):  # it was
            self._process.kill()

    def tell_to_stop(self) -> None:
        """Have the child end, and do not wait; `stop` is still to be called."""
        self.pipe.close()

    def stop(self) -> None:
        """End the child now, in order if it can, by force if not, and let go of it. No other thread may use it."""
        self.tell_to_stop()
        self.signal(signal.SIGCONT)  # a child that was stopped (SIGSTOP) could not end in order
        self._process.join(timeout=self._stop_patience_s)
        if self._process.is_alive():
            if self._was_ready:  # one that was still starting has nothing to finish
                logger.warning("%s does not stop: killing it", self.title)
            self._process.kill()
            self._process.join()
        self._process.close()


class Parent:
    """The child's end of the pipe.

    before_end: called once the parent has stopped this process or is gone, in another thread than `main`'s, which goes
    on; the process ends when it returns, and should before the parent's `stop_patience_s` are over.
    """

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.was_told = False
        self.before_end: Callable[[], None] = lambda: None

    def ready(self, info: Mapping[str, Any]) -> None:
        """Report readiness, once; info must fit into JSON."""
        self._report({"ready": dict(info)})

    def failed(self, message: str, *, for_user: bool = False) -> None:
        """Report why there will be no readiness. for_user: the user has to change a setting or the checkpoint."""
        self._report({"error": message, "for_user": for_user})

    def receive(self, timeout_s: float | None = None) -> bytes:
        """The next message; blocks. Raises queue.Empty if none comes in time."""
        return self._inbox.get(timeout=timeout_s)

    def send(self, message: bytes | bytearray | memoryview) -> None:
        """Send a message; blocks while the pipe is full. Ends this process if the parent is gone."""
        try:
            self._pipe.send_bytes(message)
        except OSError:
            os._exit(0)

    def watch(self) -> None:
        """Take in messages until the parent is gone; then end this process, whatever its other threads do."""
        try:
            while True:
                self._inbox.put(self._pipe.recv_bytes())
        except (EOFError, OSError, MemoryError):
            try:
                self.before_end()
            except Exception:
                logger.exception("something was left undone at the end")
            os._exit(0)

    def _report(self, report: Mapping[str, Any]) -> None:
        self.was_told = True
        self.send(json.dumps(report).encode())


def _run_child(
    name: str,
    main: Callable[..., None],
    args: tuple[object, ...],
    pipe: Connection,
    log_level: str,
    parent_pid: int | None,
) -> None:
    ignore_stop_signals()
    die_with_parent(parent_pid, signal.SIGKILL)
    _show_name(name)
    parent = Parent(pipe)
    threading.Thread(target=parent.watch, name="parent-watch", daemon=True).start()
    configure_logging(log_level, name)
    try:
        main(parent, *args)
        message, for_user = "returned", False
    except Exception as error:
        for_user = isinstance(error, SettingsError | CheckpointError)
        expected = isinstance(error, VlmserveError) and not parent.was_told
        message = str(error) if expected else f"{type(error).__name__}: {error}"
        if not expected or log_level == "debug":
            logger.exception("%s failed", name)
    if not parent.was_told:
        parent.failed(message if message != "returned" else f"{name} stopped early", for_user=for_user)
    else:
        logger.error("%s stopped: %s", name, message)
    # Not sys.exit: threads of a broken engine must not keep the process, and with it the server, half alive.
    sys.stderr.flush()
    os._exit(1)


def keep_socket_in(folder: Path) -> None:
    """Have multiprocessing make its socket there, not in a folder of its own, which a killed process leaves behind."""
    config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    config["tempdir"] = str(folder)


def prepare_forks(modules: Sequence[str]) -> None:
    """Start the process, unless it runs, that children are forked of: it imports these modules, in its only thread, and
    ends with this process and the last of its children. Returns at once."""
    if len(os.fsencode(tempfile.gettempdir())) > _LONGEST_TEMP_DIR_BYTES:
        # multiprocessing puts the socket there, and knows no other way to be told where else.
        config: dict[str, Any] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        if "tempdir" not in config:
            keep_socket_in(Path(tempfile.mkdtemp(prefix="pymp-", dir="/tmp")))
            atexit.register(shutil.rmtree, config["tempdir"], ignore_errors=True)
    # Otherwise it would end a moment after this process, and surprise the process that waits for this one.
    atexit.unregister(_stop_forks)
    atexit.register(_stop_forks)
    with stop_signals_held():
        multiprocessing.set_forkserver_preload(list(modules))
        forkserver.ensure_running()


def _stop_forks() -> None:
    with contextlib.suppress(OSError):  # it is gone already
        forkserver._forkserver._stop()  # type: ignore[attr-defined]  # it has no public name


def _show_name(name: str) -> None:
    """Set the name that top and ps -o comm show for this process (Linux); they show 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode(), 0, 0, 0)


def die_with_parent(parent_pid: int | None, number: signal.Signals) -> None:
    """Have the kernel send this process a signal when the thread that started it ends (Linux), whatever ends it.

    It holds for a program that this process becomes, too. parent_pid: None where the parent ends after its children.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
        if parent_pid not in (None, os.getppid()):  # it died before the call
            os._exit(1)


def is_stopped_by_a_signal(pid: int) -> bool:
    """Whether the kernel shows a process as stopped, by a signal or a debugger (Linux; elsewhere it never does)."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except (OSError, IndexError):  # it is gone, which its parent notices
        return False
