"""Templates: Jinja2 text with an item's fields, rendered in a process with limits.

A few characters can take gigabytes or hours, even to compile, and their text does not tell. A stranger may have written
them, or their fields. So the kernel limits the process's memory and CPU time, as with media.
"""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from functools import lru_cache
from typing import Any

from jinja2 import StrictUndefined, UndefinedError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from vlmserve_common.errors import BadRequestError, EngineError
from vlmserve_common.process.child import ChildProcess, Parent
from vlmserve_common.process.limits import ProcessLimits, allow_cpu_time, confine
from vlmserve_common.process.stop_signals import stop_signals_held

_ENVIRONMENT = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=False)
_IF_NOT_THERE = ("default", "d", "defined", "undefined")  # the filters and tests for a field that may not be there
_MARKS = re.compile(r"\{[{%#]")
_NEWLINE = re.compile(r"\r\n|\r|\n")
_MOST_CHARACTERS = 1 << 20
_MEMORY_BYTES = 512 << 20
_PATIENCE_S = 60.0
_MOST_DEATHS = 2  # of the process, one after the other, by one template: a folder's prompt is that of all its pictures
_RENDERED, _REFUSED = b"T", b"R"
"""The first byte of an answer: the text follows, or a sentence."""


_compiled = lru_cache(maxsize=256)(_ENVIRONMENT.from_string)


def render(text: str, fields: Mapping[str, Any]) -> str:
    """Render a template in this process. Raises BadRequestError for a missing field, or a template with a mistake."""
    try:
        return _compiled(text).render(fields)
    except Exception as error:  # a template may do anything
        told = f"cannot be filled in: {type(error).__name__}: {error}"
        if isinstance(error, UndefinedError):
            told = f"needs what is not there: {error.message}; its fields: {_listed(fields)}"
        raise _refusal(text, told) from error


def _check(text: str, known: Collection[str] | None) -> str:
    """Compile a template, and look for its fields among the known ones. Raises BadRequestError."""
    try:
        _compiled(text)
    except Exception as error:
        raise _refusal(text, f"is no Jinja2 template: {type(error).__name__}: {error}") from error
    tree = _ENVIRONMENT.parse(text)
    asked = tree.find_all((nodes.Filter, nodes.Test))
    spared = {one.node.name for one in asked if one.name in _IF_NOT_THERE and isinstance(one.node, nodes.Name)}
    missing = meta.find_undeclared_variables(tree) - spared - _ENVIRONMENT.globals.keys() - set(known or ())
    if missing and known is not None:
        raise _refusal(text, f"needs what no item has: {_listed(missing)}; their fields: {_listed(known)}")
    return ""


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "none"


def _refusal(text: str, told: str) -> BadRequestError:
    shown = repr(text if len(text) <= 100 else f"{text[:100]}...")
    return BadRequestError(f"the template {shown} {told}", code="invalid_prompt")


class TemplateProcess:
    """Renders templates, in a process that starts with the first one. cpu_s: CPU time for each.

    The thread of the first call outlives the process. `close` may come from any.
    """

    def __init__(self, *, cpu_s: float = 2.0) -> None:
        self._cpu_s = cpu_s
        self._child: ChildProcess | None = None
        self._using = threading.Lock()
        self._closed = False
        self._deaths: Counter[str] = Counter()

    def render(self, text: str, fields: Mapping[str, Any]) -> str:
        """Render a template. Raises BadRequestError, also for one that takes too much time or memory."""
        if not _MARKS.search(text):
            return _NEWLINE.sub("\n", text).removesuffix("\n")  # as Jinja does
        return self._ask(text, fields)

    def check(self, text: str, known: Collection[str] | None) -> None:
        """Raise BadRequestError for a template with a mistake, or a field that is not known. None: any may be there."""
        if _MARKS.search(text):
            self._ask(text, None if known is None else sorted(known))

    def _ask(self, text: str, fields: Mapping[str, Any] | list[str] | None) -> str:
        broken = f"takes more than {self._cpu_s:g} s of CPU time, or breaks the process that renders it"
        if self._deaths[text] >= _MOST_DEATHS:
            raise _refusal(text, broken)
        with self._using:
            child = self._started()
            try:
                child.pipe.send_bytes(json.dumps([text, fields], default=str).encode())
                if not child.pipe.poll(_PATIENCE_S):
                    raise EOFError
                answer = child.pipe.recv_bytes()
            except (EOFError, OSError):
                self._end()
                self._deaths[text] += 1
                raise _refusal(text, broken) from None
        self._deaths.pop(text, None)
        told = answer[1:].decode("utf-8", "surrogatepass")
        if answer[:1] == _REFUSED:
            raise BadRequestError(told, code="invalid_prompt")
        return told

    def close(self) -> None:
        """End the process. A template that it renders fails."""
        self._closed = True
        child = self._child
        if child is not None:
            child.kill()
        with self._using:
            self._end()

    def _started(self) -> ChildProcess:
        try:
            if self._closed:
                raise EngineError("the run has ended")
            if self._child is None:
                with stop_signals_held():
                    self._child = ChildProcess(
                        "templates", _run, (self._cpu_s,), title="the template process", log_level="warning"
                    )
                self._child.take_report()
            return self._child
        except (EngineError, OSError) as error:
            self._end()
            raise BadRequestError(f"no process can render its template: {error}", code="engine_error") from None

    def _end(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.stop()
            self._child = None


def _run(parent: Parent, cpu_s: float) -> None:
    """Run the process."""
    confine(ProcessLimits(memory_bytes=_MEMORY_BYTES))
    parent.ready({})
    while True:
        text, fields = json.loads(parent.receive())
        allow_cpu_time(cpu_s)
        try:
            parent.send(_RENDERED + _within_limits(text, fields))
        except BadRequestError as error:
            parent.send(_REFUSED + error.message.encode("utf-8", "surrogatepass"))


def _within_limits(text: str, fields: dict[str, Any] | list[str] | None) -> bytes:
    """Render a template with fields, or check it with their names."""
    for _ in range(2):
        try:
            rendered = render(text, fields) if isinstance(fields, dict) else _check(text, fields)
        except BadRequestError as error:
            if not isinstance(error.__cause__, MemoryError):
                raise
            _compiled.cache_clear()  # the templates before may have taken the memory
            continue
        if len(rendered) > _MOST_CHARACTERS:
            raise _refusal(text, f"becomes {len(rendered)} characters; the most are {_MOST_CHARACTERS}")
        return rendered.encode("utf-8", "surrogatepass")
    raise _refusal(text, f"takes more than {_MEMORY_BYTES >> 20} MiB of memory")
