"""The engine's side of the processes that compile grammars and serve their masks: see `serving`."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection

from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar import serving
from vlmserve.scheduler.grammar.matcher import CompiledGrammar
from vlmserve_common.errors import BadRequestError, EngineError

_STARTUP_S = 120.0


@dataclass(frozen=True, kw_only=True, slots=True)
class GrammarSettings:
    """Settings of grammars. folder: the checkpoint's, for its tokenizer. vocab_size: rows of logits. stop_token_ids:
    ids that may end an answer once its grammar ends.

    timeout_s: most time to compile one grammar. memory_bytes: most memory of its process, besides what all share.
    """

    folder: str
    vocab_size: int
    stop_token_ids: list[int]
    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30


class GrammarProcesses:
    """Starts a process for each grammar: a fork of one that has imported everything. Any thread may call it, and the
    first that calls `compile` must outlive it.

    Not a `ChildProcess`: that one imports the main module again, and users of `LLM` have not all guarded theirs.
    """

    def __init__(self, settings: GrammarSettings) -> None:
        self._settings = settings
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._closed = False

    def compile(self, spec: GrammarSpec, *, closed: Callable[[], None] = lambda: None) -> CompiledGrammar:
        """Compile a grammar. closed: called when its process is let go. Raises BadRequestError for one that cannot be
        compiled or takes too long. Requests may have the same grammar in different fields, so the error's message goes
        on from the field's name."""
        pipe = self._fork()
        try:
            num_bytes = self._compiled(pipe, spec)
        except BaseException:
            pipe.close()
            raise
        return CompiledGrammar(
            pipe,
            num_bytes=num_bytes,
            words=-(-self._settings.vocab_size // 32),
            stop_ids=frozenset(self._settings.stop_token_ids),
            closed=closed,
        )

    def _compiled(self, pipe: Connection, spec: GrammarSpec) -> int:
        """Wait until a process has compiled its grammar. Returns the bytes of memory that it has then."""
        settings = self._settings
        try:
            pipe.send_bytes(json.dumps(asdict(spec)).encode())
            if not pipe.poll(settings.timeout_s):
                limit = f"{settings.timeout_s:g} s (setting --grammar-timeout-s)"
                raise _refusal(f"takes longer than {limit} to compile: it is too large, or explodes")
            answer = pipe.recv_bytes()
        except (EOFError, OSError):  # the kernel ended it, most likely
            if self._closed:
                raise EngineError("the engine is being stopped") from None
            limit = f"{settings.memory_bytes >> 20} MiB"
            raise _refusal(f"cannot be compiled: it takes more than {limit}, or breaks the compiler") from None
        if answer[:1] == serving.REFUSED:
            raise _refusal(f"cannot be compiled: {answer[1:].decode()}")
        return int(answer[1:])

    def close(self) -> None:
        """End all processes. A grammar that is being compiled fails."""
        self._closed = True
        if self._process is not None:
            self._process.kill()  # the others die with it
            self._process.wait()

    def _fork(self) -> Connection:
        """Start the process of a grammar, and return this end of its pipe."""
        ours, theirs = multiprocessing.Pipe()
        with theirs, self._lock:
            try:
                socket.send_fds(self._started(), [b"g"], [theirs.fileno()])
            except OSError:  # it was ended from outside: once more
                self._control = None
                socket.send_fds(self._started(), [b"g"], [theirs.fileno()])
        return ours

    def _started(self) -> socket.socket:
        if self._control is not None:
            return self._control
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", serving.__name__, str(theirs.fileno()), str(os.getpid())]
        with theirs:
            self._process = subprocess.Popen(
                [*command, json.dumps(asdict(self._settings))],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
                start_new_session=True,  # signals of the terminal are for the parent
            )
        if self._closed:
            self._process.kill()
        ours.settimeout(_STARTUP_S)
        try:
            ready = ours.recv(1)
        except OSError:
            ready = b""
        if not ready:
            self._process.kill()
            raise EngineError("the process that compiles grammars cannot start; the log says why")
        self._control = ours
        return ours


def _refusal(why: str) -> BadRequestError:
    return BadRequestError(why, code="invalid_grammar")
