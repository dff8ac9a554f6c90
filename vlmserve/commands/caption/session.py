"""A run put together: inputs, captioner, journal, output, display. Its end is told, never raised, once it has begun.

Order of the beginning: inputs and output are checked, the journal is locked, the output gone on with, and only then a
model is loaded or servers are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import signal
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO, TextIO

import blake3

from processors.fetch.blocking import BlockingFetcher
from vlmserve.commands.batch.inputs import Inputs, open_inputs
from vlmserve.commands.batch.progress import Progress
from vlmserve.commands.caption.arguments import CaptionCommand
from vlmserve.commands.caption.bounds import named_folder, refuse_inputs_as_outputs, words_to_open
from vlmserve.commands.caption.captioner import Captioner, CaptionStopped
from vlmserve.commands.caption.errors_file import ErrorsFile
from vlmserve.commands.caption.feed import Feed, Shared
from vlmserve.commands.caption.journal import Journal
from vlmserve.commands.caption.outputs.choose import choose_journal, choose_output
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.result import Tally
from vlmserve.commands.caption.run import CaptionRun
from vlmserve.config.fields import flag
from vlmserve.config.model_path import resolve_model
from vlmserve.frontend.stage import stage_limits
from vlmserve_common.errors import VlmserveError

_FLAGS = {"response_format": "--json-schema"}
"""Of options that have another name there."""


class Ended(enum.Enum):
    """How a run did."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    TERMINATED = "ended by SIGTERM"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """told: the summary, as the command line wants it. troubles: why it stopped, if it did."""

    how: Ended
    tally: Tally
    told: str
    troubles: Sequence[str]


def caption(command: CaptionCommand, stdin: BinaryIO, out: TextIO, *, captioner: Captioner | None = None) -> Outcome:
    """Run it. captioner: one that is there already, and stays its owner's to close; None: as the command says.

    Raises SettingsError, VlmserveError or OSError when it cannot begin.
    """
    tally = Tally()
    prompts = Prompts(command.prompt, system=command.system, prefix=command.prefix, suffix=command.suffix)
    output = choose_output(command.output)
    words = words_to_open(command)
    # Local files are read wherever they are: the user has named them.
    fetch = replace(stage_limits(command.settings).fetch, allowed_local_media_path="/")
    with contextlib.ExitStack() as stack:
        fetcher = BlockingFetcher(fetch)
        stack.callback(fetcher.close)
        how, columns = command.input_format, command.columns
        inputs = open_inputs(words, fetcher=fetcher, stdin=stdin, columns=columns, input_format=how)
        if captioner is None and not command.base_urls:
            resolve_model(command.settings.engine.model)  # before any file is made
        written = [*output.paths(), *filter(None, (command.errors, command.journal))]
        refuse_inputs_as_outputs(words, written)
        errors = ErrorsFile(command.errors)
        journal = stack.enter_context(_open_journal(command, words))
        if command.restart:
            output.discard(journal)
            journal.forget()
        stack.callback(output.close)
        output.begin(journal)
        shared = Shared(prompts=prompts, journal=journal, output=output, errors=errors, tally=tally)
        progress = Progress("caption", tally, out)
        return _Session(command=command, inputs=inputs, shared=shared, progress=progress, given=captioner).run()


def _open_journal(command: CaptionCommand, words: Sequence[str]) -> Journal:
    path = command.journal
    if path is None:
        path = choose_journal(command.output.output, [named_folder(word) for word in words], command.shard)
    path.parent.mkdir(parents=True, exist_ok=True)
    return Journal(path)


@dataclass(kw_only=True)
class _Session:
    """What `caption` has put together, at work. given: see there."""

    command: CaptionCommand
    inputs: Inputs
    shared: Shared
    progress: Progress
    given: Captioner | None
    running: CaptionRun | None = None
    terminated: bool = False
    broken: bool = False
    notes: list[str] = field(default_factory=list)

    def run(self) -> Outcome:
        shared = self.shared
        troubles: list[str] = []
        how = Ended.FINISHED
        captioner = self.given or self._made()  # not in the event loop, which would keep Ctrl-C from ending it
        try:
            asyncio.run(self._run(captioner))
        except (KeyboardInterrupt, asyncio.CancelledError):
            how = Ended.TERMINATED if self.terminated else Ended.INTERRUPTED
        except (CaptionStopped, OSError) as error:
            how = Ended.STOPPED
            troubles.append(_trouble(error))
        finally:
            if self.running is not None:
                self.running.close()
            shared.errors.close()
        # not after an end that was broken off, nor where nothing can be written
        if self.running is not None and self.running.in_order and not self.broken:
            try:
                shared.output.finish()
            except OSError as error:
                how = Ended.STOPPED
                troubles.append(_trouble(error))
        with contextlib.suppress(OSError):
            shared.errors.write_anew(shared.journal.failures())
        if how is not Ended.FINISHED:
            self.notes.append("what is finished is on disk: the same command goes on from here")
        told = shared.tally.summary(self.progress.seconds, self.notes, ended=how.value)
        text = shared.tally.describe(self.progress.seconds, ended=how.value)
        return Outcome(
            how=how,
            tally=shared.tally,
            told=json.dumps(told, indent=2) if self.command.json else "\n".join([text, *self.notes]),
            troubles=troubles,
        )

    async def _run(self, captioner: Captioner) -> None:
        command, shared = self.command, self.shared
        this = asyncio.current_task()
        assert this is not None

        def terminate() -> None:
            self.terminated = True
            this.cancel()

        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, terminate)
        async with contextlib.AsyncExitStack() as stack:
            if captioner is not self.given:
                stack.push_async_callback(captioner.close)
                await captioner.start()
            stack.callback(lambda: self.notes.extend(captioner.notes()))
            settings = self._settings(captioner)
            shared.journal.begin(settings)
            shared.errors.begin(shared.journal.failures())
            again = command.retry_failed
            feed = Feed(iter(self.inputs), shared, shard=command.shard, limit=command.limit, retry_failed=again)
            fingerprint = blake3.blake3(json.dumps(settings, sort_keys=True).encode()).digest()
            self.running = run = CaptionRun(feed, captioner, replace(command.run, fingerprint=fingerprint), shared)
            with self.progress, _counting(self.inputs, shared.tally, command):
                showing = asyncio.create_task(self.progress.keep_shown())
                try:
                    await run.run()
                except OSError:
                    self.broken = True  # nothing can be written: not the end of a part, either
                    raise
                finally:
                    showing.cancel()

    def _made(self) -> Captioner:
        """The engine in this process, or the servers that do the work."""
        command = self.command
        if command.base_urls:
            from vlmserve.commands.caption.remote import RemoteCaptioner

            return RemoteCaptioner(
                command.base_urls,
                api_key=command.settings.api_key,
                model=command.settings.engine.model or None,
                request_timeout_s=command.request_timeout_s,
                server_timeout_s=command.server_timeout_s,
            )
        from vlmserve.commands.caption.local import LocalCaptioner

        return LocalCaptioner(
            command.settings, concurrency=command.run.concurrency, nothing_twice=command.nothing_twice
        )

    def _settings(self, captioner: Captioner) -> dict[str, object]:
        """What makes captions other ones, under the names of flags."""
        command = self.command
        return {
            "the model": captioner.identity,
            "--prompt": command.prompt,
            "--system-prompt": command.system,
            "--prefix": command.prefix,
            "--suffix": command.suffix,
            "--seed": command.run.seed,
            "--output": None if command.output.output is None else Path(command.output.output).name,
            "--caption-suffix": command.output.suffix,
            **{_FLAGS.get(name, flag(name)): value for name, value in command.run.options.items()},
            **{flag(name): value for name, value in command.run.video_knobs.items()},
        }


@contextlib.contextmanager
def _counting(inputs: Inputs, tally: Tally, command: CaptionCommand) -> Iterator[None]:
    """Count ahead, in a thread of its own, for the display."""
    stopped = threading.Event()

    def count() -> None:
        with contextlib.suppress(VlmserveError, OSError):  # which the run itself meets, and tells
            for number in inputs.count():
                if number is None or stopped.is_set():
                    return
                ours = number // command.shard.count
                tally.total = ours if command.limit is None else min(ours, command.limit)
                if tally.total == command.limit:
                    break
            tally.counted = True

    thread = threading.Thread(target=count, name="caption-count", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()


def _trouble(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        where = f"{error.filename}: " if error.filename else ""
        return f"{where}{error.strerror}"
    return str(error)
