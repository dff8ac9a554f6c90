"""A process that compiles grammars, started when it is needed, and ended when a grammar takes too long."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

from vlmserve.ipc.messages import GrammarSpec
from vlmserve.scheduler.grammar import compiling
from vlmserve.scheduler.grammar.matcher import CompiledGrammar
from vlmserve_common.errors import BadRequestError, EngineError

_STARTUP_S = 120.0
_MOST_COMPILED_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class CompilerSettings:
    """Settings of the compiler. folder: the checkpoint's, for its tokenizer. vocab_size: rows of logits.
    stop_token_ids: ids that may end an answer once its grammar ends.

    timeout_s: most time for one grammar. memory_bytes: most memory for it, besides the process's own.
    """

    folder: str
    vocab_size: int
    stop_token_ids: list[int]
    timeout_s: float = 10.0
    memory_bytes: int = 1 << 30


class CompileProcess:
    """A process that compiles grammars for one thread, which outlives it.

    Not a `ChildProcess`: that one imports the main module again, and users of `LLM` have not all guarded theirs.
    """

    def __init__(self, settings: CompilerSettings) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._pipe: Connection | None = None
        self._tokens: Any = None
        self._closed = False

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile a grammar. Raises BadRequestError for one that cannot be compiled or takes too long. Requests may
        have the same grammar in different fields, so the error's message goes on from the field's name."""
        import xgrammar  # takes most of a second, and only servers of structured output need it

        pipe = self._started()
        try:
            pipe.send_bytes(json.dumps(asdict(spec)).encode())
            if not pipe.poll(self._settings.timeout_s):
                self._end()
                limit = f"{self._settings.timeout_s:g} s (setting --grammar-timeout-s)"
                raise _refusal(f"takes longer than {limit} to compile: it is too large, or explodes")
            answer = pipe.recv_bytes()
        except (EOFError, OSError):  # the kernel ended it, most likely
            self._end()
            if self._closed:
                raise EngineError("the engine is being stopped") from None
            limit = f"{self._settings.memory_bytes >> 20} MiB"
            raise _refusal(f"cannot be compiled: it takes more than {limit}, or breaks the compiler") from None
        if answer[:1] == compiling.REFUSED:
            raise _refusal(f"cannot be compiled: {answer[1:].decode()}")
        if len(answer) > _MOST_COMPILED_BYTES:
            raise _refusal(f"compiles to {len(answer)} bytes; the limit is {_MOST_COMPILED_BYTES}")
        return CompiledGrammar(xgrammar.CompiledGrammar.deserialize_json(answer[1:].decode(), self._tokens))

    def close(self) -> None:
        """End the process, from any thread. A grammar that it is compiling fails."""
        self._closed = True
        if self._process is not None:
            self._process.kill()

    def _started(self) -> Connection:
        if self._pipe is not None:
            return self._pipe
        from xgrammar import TokenizerInfo

        ours, theirs = multiprocessing.Pipe()
        command = [sys.executable, "-m", compiling.__name__, str(theirs.fileno()), str(os.getpid())]
        self._process = subprocess.Popen(
            [*command, json.dumps(asdict(self._settings))],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            start_new_session=True,  # signals of the terminal are for the parent
        )
        self._pipe = ours
        theirs.close()
        if self._closed:
            self._process.kill()
        try:
            if not ours.poll(_STARTUP_S):
                raise EOFError
            tokens = ours.recv_bytes().decode()
        except (EOFError, OSError):
            self._end()
            raise EngineError("the process that compiles grammars cannot start; the log says why") from None
        if self._tokens is None:
            self._tokens = TokenizerInfo.deserialize_json(tokens)
        return ours

    def _end(self) -> None:
        if self._pipe is not None:
            self._pipe.close()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=10)
        self._pipe = self._process = None


def _refusal(why: str) -> BadRequestError:
    return BadRequestError(why, code="invalid_grammar")
