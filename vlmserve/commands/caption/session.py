"""Puts a run together: inputs, captioner, journal, chosen output, display. Once begun, it ends with a summary.

Order of the beginning: inputs and output are checked, the journal is locked, the output is continued, and only then a
model is loaded or servers are asked.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import blake3

from vlmserve.commands.batch.command_line import make_fetcher
from vlmserve.commands.batch.inputs import Inputs, local_files, open_inputs
from vlmserve.commands.batch.progress import RunProgress
from vlmserve.commands.batch.shared_files import place_of, refuse_shared_files
from vlmserve.commands.caption.command import CaptionCommand, named_folder, words_to_open
from vlmserve.commands.caption.feed import Feed, ItemShard, Shared
from vlmserve.commands.caption.journal import CaptionJournal, ErrorsFile
from vlmserve.commands.caption.outputs.base import JsonLinesOutput, Output, PartNames, Sidecars
from vlmserve.commands.caption.outputs.parts import Parquet, Tars
from vlmserve.commands.caption.prompts import Prompts
from vlmserve.commands.caption.result import CaptionTally
from vlmserve.commands.caption.run import Captioner, CaptionRun, CaptionStopped
from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.model_path import resolve_model
from vlmserve_common.errors import VlmserveError

_FLAGS = {"response_format": "--json-schema"}
"""The flags of options with another name."""


class Ended(enum.Enum):
    """The ways in which a run ends."""

    FINISHED = "finished"
    INTERRUPTED = "interrupted"
    TERMINATED = "ended by SIGTERM"
    STOPPED = "stopped"


@dataclass(frozen=True, kw_only=True)
class CaptionEnd:
    """The end of a run. summary: text or JSON for the user. troubles: the reasons why it stopped, if it did."""

    how: Ended
    tally: CaptionTally
    summary: str
    troubles: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a run makes of each item. name: the command's. maker: the class of `Captioner` that makes it by servers
    (True), or by an engine in a process. outputs: the kinds of outputs by the endings of their names; "folder" is one.
    prompted: items need a prompt."""

    name: str
    tally: type[CaptionTally]
    outputs: Mapping[str, Callable[..., Output]]
    maker: Callable[[bool], type[Any]]
    prompted: bool = True


def _maker(by_servers: bool) -> type[Any]:
    if by_servers:
        from vlmserve.commands.caption.remote import RemoteCaptioner

        return RemoteCaptioner
    from vlmserve.commands.caption.local import LocalCaptioner

    return LocalCaptioner


CAPTIONS = Work(
    name="caption",
    tally=CaptionTally,
    maker=_maker,
    outputs={
        ".jsonl": JsonLinesOutput,
        ".ndjson": JsonLinesOutput,
        ".parquet": Parquet,
        ".tar": Tars,
        "folder": Sidecars,
    },
)


def caption(
    command: CaptionCommand,
    stdin: BinaryIO,
    out: TextIO,
    *,
    captioner: Captioner | None = None,
    work: Work = CAPTIONS,
) -> CaptionEnd:
    """Run the command. captioner: an existing one, which its owner closes; None makes the command's own.

    Raises SettingsError, VlmserveError or OSError if the run cannot begin.
    """
    tally = work.tally()
    prompts = Prompts(
        command.prompt,
        system=command.system_prompt,
        prefix=command.prefix,
        suffix=command.suffix,
        needed=work.prompted,
    )
    output = choose_output(
        command.output,
        suffix=command.caption_suffix,
        overwrite=command.overwrite,
        items_per_file=command.items_per_file,
        work=work,
    )
    words = words_to_open(command)
    with contextlib.ExitStack() as stack:
        stack.callback(prompts.close)
        fetcher = make_fetcher(command.settings)
        stack.callback(fetcher.close)
        how, columns = command.input_format, command.columns
        inputs = open_inputs(words, fetcher=fetcher, stdin=stdin, columns=columns, input_format=how)
        prompts.check(inputs.prompt_fields)
        if captioner is None and not command.base_urls and command.ray is None:
            engine = command.settings.engine
            resolve_model(engine.model, engine.revision)  # before any file is made
        folders = list(map(named_folder, words))
        journal_path = command.journal or choose_journal(command.output, folders, command.shard, work)
        output.kept = _refuse_shared_files(command, words, output, journal_path)
        errors = ErrorsFile(command.errors)
        journal_path.parent.mkdir(parents=True, exist_ok=True)
        journal = stack.enter_context(CaptionJournal(journal_path))
        if command.restart:
            output.discard(journal)
            journal.forget()
        stack.callback(output.close)
        output.begin(journal)
        shared = Shared(prompts=prompts, journal=journal, output=output, errors=errors, tally=tally)
        progress = RunProgress(work.name, tally, out)
        session = _CaptionSession(
            command=command, inputs=inputs, shared=shared, progress=progress, given=captioner, work=work
        )
        return session.run()


def _refuse_shared_files(
    command: CaptionCommand, words: Sequence[str], output: Output, journal: Path
) -> Mapping[str, str]:
    """Raise SettingsError for a file with two uses. Returns the places of files that no caption may replace.

    Their uses are beside them.
    """
    of_journal = [journal, journal.with_name(f"{journal.name}-wal")]  # SQLite makes the second
    named = [*of_journal, *filter(None, [command.errors])]
    outputs = output.paths(named)
    written = [
        ("--errors", command.errors),
        *(("--journal", path) for path in of_journal),
        *(("--output", path) for path in outputs),
    ]
    read = [
        *(("INPUT", path) for path in local_files(words, [*outputs, *named])),
        ("--prompt-file", command.prompt_file),
        ("--json-schema", command.json_schema),
    ]
    refuse_shared_files(written, read)
    uses = [(option, path) for option, path in [*written, *read] if path is not None]
    return {place: option for option, path in uses for place in (place_of(path), os.path.realpath(path))}


@dataclass(kw_only=True)
class _CaptionSession:
    """A run at work. given: the captioner of `caption`'s caller."""

    command: CaptionCommand
    inputs: Inputs
    shared: Shared
    progress: RunProgress
    given: Captioner | None
    work: Work
    running: CaptionRun | None = None
    terminated: bool = False
    broken: bool = False
    notes: list[str] = field(default_factory=list)

    def run(self) -> CaptionEnd:
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
        # not if the end was broken off, or if nothing can be written
        if self.running is not None and self.running.in_order and not self.broken:
            try:
                shared.output.finish()
            except OSError as error:
                how = Ended.STOPPED
                troubles.append(_trouble(error))
        with contextlib.suppress(OSError):
            shared.errors.write_anew(shared.journal.failures())
        if how is not Ended.FINISHED and self.running is not None:
            again = "once that is mended, the command" if how is Ended.STOPPED else "the same command"
            self.notes.append(f"finished {self.work.name}s are on disk: {again} continues from here")
        told = shared.tally.summary(self.progress.seconds, self.notes, ended=how.value)
        text = shared.tally.describe(self.progress.seconds, ended=how.value)
        return CaptionEnd(
            how=how,
            tally=shared.tally,
            summary=json.dumps(told, indent=2) if self.command.json else "\n".join([text, *self.notes]),
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
                    self.broken = True  # nothing can be written, not even the end of a part
                    raise
                finally:
                    showing.cancel()

    def _made(self) -> Captioner:
        command, maker = self.command, self.work.maker(bool(self.command.base_urls))
        if command.base_urls:
            return maker(
                command.base_urls,
                api_key=command.settings.api_key,
                model=command.settings.engine.model or None,
                request_timeout_s=command.request_timeout_s,
                server_timeout_s=command.server_timeout_s,
            )
        how: dict[str, Any] = {"concurrency": command.run.concurrency, "nothing_twice": command.nothing_twice}
        if command.ray is not None:
            from vlmserve.commands.caption.on_ray import RayCaptioner, RaySettings

            ray = RaySettings(
                address=command.ray,
                actors=command.ray_actors,
                cpus=command.ray_cpus,
                patience_s=command.server_timeout_s,
            )
            return RayCaptioner(ray, command.settings, maker=maker, **how)
        return maker(command.settings, **how)

    def _settings(self, captioner: Captioner) -> dict[str, object]:
        """Return everything that influences captions, under the names of flags."""
        command = self.command
        return {
            "the model": captioner.identity,
            "--prompt": command.prompt,
            "--system-prompt": command.system_prompt,
            "--prefix": command.prefix,
            "--suffix": command.suffix,
            "--seed": command.run.seed,
            "--output": None if command.output is None else Path(command.output).name,
            "--caption-suffix": command.caption_suffix,
            **{_FLAGS.get(name, flag(name)): value for name, value in command.run.options.items()},
            **{flag(name): value for name, value in command.run.video_knobs.items()},
        }


@contextlib.contextmanager
def _counting(inputs: Inputs, tally: CaptionTally, command: CaptionCommand) -> Iterator[None]:
    """Count the items for the display, in a thread of its own."""
    stopped = threading.Event()

    def count() -> None:
        with contextlib.suppress(VlmserveError, OSError):  # the run itself meets and reports them
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


_NUMBER = re.compile(r"%0?\d*d")
_LINES = (".jsonl", ".ndjson")
_JOURNAL = ".vlmserve-"


def choose_output(
    output: str | None, *, suffix: str, overwrite: bool, items_per_file: int, work: Work = CAPTIONS
) -> Output:
    """Make the output that the name asks for; None puts captions beside the files.

    suffix, overwrite: see `Sidecars`. items_per_file: items in a part of parquet or tars. Raises SettingsError for a
    name of no known form.
    """
    kind = "folder" if output is None else _kind(output, work)
    if output is None or kind == "folder":
        return work.outputs["folder"](None if output is None else Path(output), suffix=suffix, overwrite=overwrite)
    if kind in _LINES:
        return work.outputs[kind](Path(output))
    return work.outputs[kind](PartNames(output), items_per_file=items_per_file)


def choose_journal(output: str | None, folders: Sequence[Path], shard: ItemShard, work: Work = CAPTIONS) -> Path:
    """Return the path of the journal: beside the output, or in it if it is a folder.

    folders: of the local files, if there is no output. The journal goes to the folder that holds them all, or to the
    current one if only the root does.
    """
    part = f"-{shard.index}-of-{shard.count}" if shard.count > 1 else ""
    if output is None:
        common = Path(os.path.commonpath([folder.absolute() for folder in folders])) if folders else Path.cwd()
        return (Path.cwd() if common == Path(common.root) else common) / f"{_JOURNAL}{work.name}{part}.journal"
    if _kind(output, work) == "folder":
        return Path(output) / f"{_JOURNAL}{work.name}{part}.journal"
    path = Path(_NUMBER.sub("N", output))
    return path.with_name(f"{path.name}.journal")


def _kind(name: str, work: Work) -> str:
    """Return the suffix, or "folder"."""
    path = Path(name)
    numbers = _NUMBER.findall(path.name)
    suffix = path.suffix.lower()
    if path.is_dir() or name.endswith("/") or not suffix:
        if path.exists() and not path.is_dir():
            raise SettingsError(f"--output is {name!r}, which is there and no folder")
        return "folder"
    if suffix not in work.outputs:
        *known, last = (kind for kind in work.outputs if kind not in ("folder", _LINES[1]))
        raise SettingsError(
            f"--output is {name!r}; it must end with {', '.join(known)} or {last}, or be a folder (with / at its end)"
        )
    if suffix in _LINES and numbers:
        raise SettingsError(f"--output is {name!r}; lines of JSON are one file, without a number in its name")
    if suffix in _LINES:
        return suffix
    if path.name.count("%") != len(numbers) or len(numbers) > 1 or "%" in str(path.parent):
        raise SettingsError(f"--output is {name!r}; a number of parts is written %05d, once, in the file's name")
    return suffix
