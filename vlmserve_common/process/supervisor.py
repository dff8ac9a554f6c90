"""Keeps a child process running: starts it, has it used, and starts it again when it dies."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

from vlmserve_common.errors import EngineError, SettingsError
from vlmserve_common.process.child import ChildProcess
from vlmserve_common.process.stop_signals import stop_signals_held
from vlmserve_common.transport.shm import SharedArrays

logger = logging.getLogger(__name__)

_LONGEST_PAUSE_S = 30.0


class EndedInOrderError(EngineError):
    """A process was ended on purpose, to end its work: no warning is needed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ProcessPlan:
    """The process that is kept running. name, title, main, args, log_level, forked: see `ChildProcess`.

    startup_timeout_s: for each start; ready_by: when it is over for the first one, by the keeper's clock.
    most_deaths: after so many useless lives, one after the other, the process counts as down. first_pause_s: the pause
    before the next start then, which doubles; None: there is no next start.
    """

    name: str
    title: str
    main: Callable[..., None]
    args: tuple[object, ...]
    log_level: str
    startup_timeout_s: float
    ready_by: float = math.inf
    forked: bool = False
    most_deaths: int = 3
    first_pause_s: float | None = None


class Life(Protocol):
    """The work of a process that is kept running. The keeper's thread calls these in this order, the first two if it
    gets there.

    useful: to be set once the process has been of use; the keeper takes it back before each start.
    """

    useful: bool

    def begin(self, child: ChildProcess, report: dict[str, Any]) -> None:
        """It is ready, and says so much of itself. EngineError: it cannot be used."""

    def live(self, child: ChildProcess) -> None:
        """Use the child until it is gone. EOFError and OSError say that; EngineError gives another reason.

        EndedInOrderError: nothing is logged.
        """

    def let_go(self) -> None:
        """It is being ended: no other thread may use it when this returns."""

    def ended(self, reason: str, *, down: bool) -> None:
        """Nothing is left of it. down: it will not be started again, or not soon."""


class ProcessKeeper:
    """One process, in a thread of its own. shared: where it put arrays, which go with it. clock: in seconds.

    first_start: its report, once it is ready for the first time; an EngineError that says why if it cannot start.
    """

    def __init__(
        self, plan: ProcessPlan, life: Life, shared: SharedArrays, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.first_start: Future[dict[str, Any]] = Future()
        self._plan = plan
        self._life = life
        self._shared = shared
        self._clock = clock
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._closing = threading.Event()
        self._in_order = False
        self._thread = threading.Thread(target=self._keep, name=plan.name, daemon=True)

    def start(self) -> None:
        """Begin. To be called once."""
        self._thread.start()

    def begin_close(self) -> None:
        """Tell the process to end."""
        with self._lock:
            self._closing.set()
            if self._child is not None:
                self._child.hang_up()

    def close(self) -> None:
        """End the process, by force if it does not of itself in `STOP_PATIENCE_S`. May be called again."""
        self.begin_close()
        self._thread.join()

    def _keep(self) -> None:
        plan, deaths, pause_s = self._plan, 0, self._plan.first_pause_s
        while not self._closing.is_set():
            self._life.useful = False
            try:
                reason = self._run_once()
            except Exception as error:
                logger.exception("%s fails", plan.title)
                reason = f"{plan.title} cannot be started: {type(error).__name__}: {error}"
            deaths = 0 if self._life.useful else deaths + 1
            down = deaths >= plan.most_deaths
            if not self.first_start.done():
                self.first_start.set_exception(EngineError(reason))
            if not self._closing.is_set() and not self._in_order:
                self._log(reason, deaths, pause_s if down else 0.0)
            self._life.ended(reason, down=down)
            if not down:
                pause_s = plan.first_pause_s
            elif pause_s is None:
                return
            else:
                self._closing.wait(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    @staticmethod
    def _log(reason: str, deaths: int, pause_s: float | None) -> None:
        if pause_s is None:
            logger.error("%s: given up after %d deaths with nothing done between them", reason, deaths)
        elif pause_s:
            logger.error("%s: the next try in %g s", reason, pause_s)
        else:
            logger.warning("%s: starting it again", reason)

    def _run_once(self) -> str:
        """One life of the process. Returns how it ended; nothing is left of it."""
        plan, self._in_order = self._plan, False
        with stop_signals_held():
            child = ChildProcess(
                plan.name, plan.main, plan.args, title=plan.title, log_level=plan.log_level, forked=plan.forked
            )
        with self._lock:
            self._child = child
            if self._closing.is_set():
                child.hang_up()
        try:
            report = self._await_report(child)
            self._life.begin(child, report)
            if not self.first_start.done():
                self.first_start.set_result(report)
            self._life.live(child)
            raise EngineError(f"nobody uses {plan.title} any more")
        except (EOFError, OSError):
            return f"{plan.title} was stopped" if self._closing.is_set() else child.how_it_died()
        except (EngineError, SettingsError) as error:
            self._in_order = isinstance(error, EndedInOrderError)
            return str(error)
        except Exception as error:
            logger.exception("%s does not make sense", plan.title)
            return f"{plan.title} sent what cannot be used: {type(error).__name__}: {error}"
        finally:
            child.hang_up()
            with self._lock:
                self._child = None
            self._life.let_go()
            child.stop()
            self._shared.discard_of(child.pid)

    def _await_report(self, child: ChildProcess) -> dict[str, Any]:
        limit_s = patience_s = self._plan.startup_timeout_s
        if not self.first_start.done():
            patience_s = max(0.0, min(limit_s, self._plan.ready_by - self._clock()))
        if not child.pipe.poll(patience_s):
            raise EngineError(f"{child.title} is not ready after {limit_s:g} s; --startup-timeout-s allows more")
        return child.take_report()
