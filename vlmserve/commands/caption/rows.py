"""Actors for `ray.data.Dataset.map_batches`: each has an engine, and answers the rows of several batches together."""

from __future__ import annotations

import asyncio
import dataclasses
import io
import json
import logging
import math
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, Unpack

import numpy as np
from PIL import Image

from processors.fetch.fetching import BlockingFetcher
from processors.fetch.limits import FetchSettings
from processors.inputs import Modality
from vlmserve.commands.batch.inputs.files import MEDIA_COLUMNS, Columns, MediaReader, item_of, media_column
from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.local import LocalCaptioner
from vlmserve.commands.caption.opening import CaptionSettings, open_item, read_item, record_of
from vlmserve.commands.caption.prompts import DEFAULT_PROMPT, Prompts
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.commands.client.media import with_addresses
from vlmserve.commands.offline.inputs import EngineSettings, keywords_named, read_settings
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.json_bodies import checked
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import BadRequestError, EngineError

if TYPE_CHECKING:
    from ray.data import Dataset

logger = logging.getLogger(__name__)

_MOST_MEDIA_PROCESSES, _READERS = 8, 16
_READING_CPUS = 1.0  # of a node, for Ray's own tasks: they read files
_COUNTS = {"prompt_tokens": 0, "completion_tokens": 0}
_T = TypeVar("_T")


class RowActor(ABC):
    """The engine of an actor, and what it does with each row. A row that fails has its reason in the column `error`,
    which is empty in all others.

    model, settings: as of `LLM`. options: fields of all chat requests, such as max_tokens. concurrency: rows at a time;
    None takes max_running_requests. fetch: what URLs may reach; paths are read, so rows must not be written by
    strangers. Raises CheckpointError, EngineError, SettingsError or BadRequestError.
    """

    columns: ClassVar[Mapping[str, Any]]
    """The columns of answers, with their values in rows that have none: a column has one type in all blocks."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        settings: Mapping[str, Any],
        *,
        options: Mapping[str, Any],
        concurrency: int | None,
        fetch: FetchSettings | None,
        nothing_twice: bool,
    ) -> None:
        checked({**options, "messages": [{"role": "user", "content": "-"}]}, ChatCompletionRequest)
        defaults: dict[str, Any] = {"media_processes": min(_MOST_MEDIA_PROCESSES, available_cpus())}
        if nothing_twice:  # caches would not help
            defaults |= {"processor_cache_mib": 0, "disable_radix_cache": True}
        args, limits = read_settings(model, None, {**defaults, **settings})
        server = ServerSettings(
            engine=args,
            max_images_per_request=limits.counts.images,
            max_videos_per_request=limits.counts.videos,
            log_level="warning",
        )
        self._concurrency = concurrency or args.max_running_requests
        self._room = asyncio.Semaphore(self._concurrency)
        with keywords_named():
            self._engine = LocalCaptioner(server, concurrency=self._concurrency, nothing_twice=nothing_twice)
        self._media = MediaReader(
            BlockingFetcher(dataclasses.replace(fetch or FetchSettings(), allowed_local_media_path="/"))
        )
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="caption-read")
        if _is_in_actor():
            threading.Thread(target=_end_with_main_thread, name="end-with-main", daemon=True).start()

    async def __call__(self, batch: Mapping[str, np.ndarray]) -> dict[str, Any]:
        """Return a batch with the columns of answers beside its own. Batches may be under way together."""
        answers = await asyncio.gather(*map(self._answered, _rows(batch)))
        return {
            **self._kept(batch),
            **{name: _column([one.get(name, empty) for one in answers]) for name, empty in self.columns.items()},
        }

    async def close(self) -> None:
        """End the engine and its processes. Ray just ends the actor's process, which does the same."""
        self._readers.shutdown(wait=False, cancel_futures=True)
        self._media.fetcher.close()
        await self._engine.close()

    @classmethod
    def over(
        cls,
        dataset: Dataset,
        model: str | os.PathLike[str] = "",
        *,
        actors: int = 1,
        cpus: float | None = None,
        batch_size: int = 16,
        **arguments: Any,
    ) -> Dataset:
        """Return `dataset.map_batches` with this class, the resources that it needs, and enough batches at a time.

        cpus: that each actor reserves; None takes 1 beside GPUs, and otherwise all of a node but one: Ray reads files
        with it. Each rank has a GPU, where there are any. arguments: of this class. Raises SettingsError for a wrong
        setting, EngineError if the cluster has no room.
        """
        import ray.data

        from vlmserve.commands.caption.on_ray import bundle, threads_in
        from vlmserve.ray.cluster import HERE, Cluster

        names = EngineSettings.__annotations__
        args, _ = read_settings(model, None, {name: value for name, value in arguments.items() if name in names})
        cluster = Cluster(HERE, setting="over")
        resources = bundle(cluster, args, cpus, spare=_READING_CPUS)
        cluster.check_room(resources, actors, what="actors")
        threads = threads_in(resources)
        given = {"model": os.fspath(model), **({"num_threads": threads} if threads else {}), **arguments}
        # while some batches wait for their last rows, the others keep the engine busy
        batches = 1 + math.ceil(2 * (arguments.get("concurrency") or args.max_running_requests) / batch_size)
        return dataset.map_batches(
            cls,
            fn_constructor_kwargs=given,
            batch_size=batch_size,
            compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=batches),
            max_concurrency=batches,
            num_cpus=resources["CPU"],
            num_gpus=resources["GPU"],
        )

    @abstractmethod
    async def _answer(self, row: dict[str, Any]) -> Mapping[str, Any]:
        """Return the columns of a row's answer. Raises BadRequestError or EngineError."""

    def _kept(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        return batch

    async def _answered(self, row: dict[str, Any]) -> Mapping[str, Any]:
        async with self._room:
            try:
                return await self._answer(row)
            except (BadRequestError, EngineError) as error:
                return {"error": str(error)}
            except CaptionStopped as error:
                logger.critical("%s", error)
                os._exit(1)  # Ray starts another actor, which does the same batches
            except Exception as error:
                logger.exception("a row failed unexpectedly")
                return {"error": f"{type(error).__name__}: {error}"}

    async def _read(self, function: Callable[..., _T], *args: Any) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._readers, function, *args)


class Captioner(RowActor):
    """Captions a picture or video in each row, by the rules of `vlmserve caption`.

        dataset.map_batches(Captioner, fn_constructor_kwargs={"prompt": "What is this?"}, batch_size=16, concurrency=2)

    The medium is a file's bytes, a path, a URL, a dict {"bytes", "path"}, or an array of pixels (uint8,
    [height, width, 3]). media_column: None takes the first one with a usual name. prompt, prefix, suffix: templates of
    the row's columns; prompt_column: has prompts of single rows. options: temperature is 0 and max_tokens 256 if it has
    none. sampling_seed: equal rows have equal seeds, which follow from it. keep_media: False leaves the medium out of
    the result. The rest: see `RowActor`.
    """

    columns: ClassVar[Mapping[str, Any]] = {"caption": "", "captions": [], "finish_reason": "", **_COUNTS, "error": ""}

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        prompt: str = DEFAULT_PROMPT,
        system_prompt: str | None = None,
        prefix: str = "",
        suffix: str = "",
        media_column: str | None = None,
        prompt_column: str | None = None,
        id_column: str | None = None,
        options: Mapping[str, Any] | None = None,
        sampling_seed: int = 0,
        keep_media: bool = True,
        concurrency: int | None = None,
        fetch: FetchSettings | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        options = {"max_tokens": 256, "temperature": 0.0, **(options or {})}
        self._columns = Columns(media=media_column, prompt=prompt_column, id=id_column)
        self._keep_media = keep_media
        self._prompts = Prompts(prompt, system=system_prompt, prefix=prefix, suffix=suffix)
        self._prompts.check()
        nothing_twice = not prompt_column and not system_prompt and options.get("n", 1) == 1
        super().__init__(
            model, settings, options=options, concurrency=concurrency, fetch=fetch, nothing_twice=nothing_twice
        )
        self._settings = CaptionSettings(concurrency=self._concurrency, options=options, seed=sampling_seed)
        self._templates = ThreadPoolExecutor(1, thread_name_prefix="caption-prompt")  # outlives its process

    async def close(self) -> None:
        await super().close()
        self._templates.shutdown()
        self._prompts.close()

    async def _answer(self, row: dict[str, Any]) -> Mapping[str, Any]:
        column = media_column((name for name, value in row.items() if value is not None), self._columns.media)
        if column is None:
            wanted = self._columns.media or f"{', '.join(MEDIA_COLUMNS[:4])} ... (media_column)"
            raise BadRequestError(f"the row has no picture or video; looked for {wanted}")
        value = row[column]
        if isinstance(value, np.ndarray):
            value = await self._read(_picture_file, column, value)
        record = {name: one for name, one in row.items() if not isinstance(one, np.ndarray)} | {column: value}
        id_ = value if isinstance(value, str) and not value.startswith("data:") else ""
        item = item_of(record, column, id=id_, signature="", base="", media=self._media, columns=self._columns)
        loop = asyncio.get_running_loop()
        asked = await loop.run_in_executor(self._templates, self._prompts.ask, item)
        opened = await self._read(
            lambda: open_item(item, asked, self._settings, prompts=self._prompts, model=self._engine.model)
        )
        answer = await self._engine.ask(opened.request)
        made = record_of(item, asked, opened, answer)
        return {"captions": [made["caption"]], **made, "finish_reason": _finish(answer)}

    def _kept(self, batch: Mapping[str, np.ndarray]) -> Mapping[str, np.ndarray]:
        if self._keep_media:
            return batch
        medium = media_column(batch, self._columns.media)
        return {name: values for name, values in batch.items() if name != medium}


class VLMProcessor(RowActor):
    """Answers a chat request in each row.

    messages_column: has OpenAI's messages, as lists or as text in JSON. Files in them may be bytes, paths and URLs.
    options_column: has further fields of single rows' requests, in the same two forms. The columns of a result are
    `answer`, and `response`: the whole chat.completion in JSON, with all answers and calls. The rest: see `RowActor`.
    """

    columns: ClassVar[Mapping[str, Any]] = {"answer": "", "response": "", "finish_reason": "", **_COUNTS, "error": ""}

    def __init__(
        self,
        model: str | os.PathLike[str] = "",
        *,
        messages_column: str = "messages",
        options_column: str | None = None,
        options: Mapping[str, Any] | None = None,
        concurrency: int | None = None,
        fetch: FetchSettings | None = None,
        **settings: Unpack[EngineSettings],
    ) -> None:
        self._messages, self._options = messages_column, options_column
        self._common = dict(options or {})
        super().__init__(
            model, settings, options=self._common, concurrency=concurrency, fetch=fetch, nothing_twice=False
        )

    async def _answer(self, row: dict[str, Any]) -> Mapping[str, Any]:
        messages = _from_json(row.get(self._messages), self._messages)
        if not isinstance(messages, list):
            raise BadRequestError(f"{self._messages} is {type(messages).__name__}; it must be a list of messages")
        options = self._common
        if self._options is not None:
            options = {**options, **(_from_json(row.get(self._options), self._options) or {})}
        request = ChatRequest(messages=await self._read(self._with_files, messages), options=options)
        answer = await self._engine.ask(request)
        usage = answer.get("usage") or {}
        return {
            "answer": answer["choices"][0]["message"].get("content") or "",
            "response": json.dumps(answer, ensure_ascii=False),
            "finish_reason": _finish(answer),
            **{name: usage.get(name, 0) for name in _COUNTS},
        }

    def _with_files(self, messages: list[Any]) -> list[Mapping[str, Any]]:
        def read(address: str, modality: Modality) -> bytes:
            return read_item(self._media.open(address, modality).read)

        return with_addresses(messages, read)


def _is_in_actor() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized() and ray.get_runtime_context().get_actor_id() is not None


def _end_with_main_thread() -> None:
    """End the process once Ray has it end. Python would wait for the engine's thread, which nobody ends there."""
    threading.main_thread().join()
    os._exit(0)


def _rows(batch: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    count = min(map(len, batch.values()), default=0)
    return [{name: _plain(values[index]) for name, values in batch.items()} for index in range(count)]


def _plain(value: Any) -> Any:
    """Return a value of a batch as Python's; an array of numbers with two dimensions or more stays one.

    Tables fill in fields that other rows have: these are left out.
    """
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) and value.ndim > 1 and value.dtype != object:
        return value
    if isinstance(value, np.ndarray | list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items() if one is not None}
    return value


def _column(values: Sequence[Any]) -> np.ndarray:
    column = np.empty(len(values), dtype=object)
    for index, value in enumerate(values):  # all at once, lists of equal lengths would be another dimension
        column[index] = value
    return column


def _picture_file(column: str, pixels: np.ndarray) -> bytes:
    """Return pixels as a PNG file, which keeps them all."""
    flat = pixels[:, :, 0] if pixels.ndim == 3 and pixels.shape[2] == 1 else pixels
    if flat.dtype != np.uint8 or not (flat.ndim == 2 or (flat.ndim == 3 and flat.shape[2] in (3, 4))):
        told = f"{column} is an array of {pixels.dtype}, {list(pixels.shape)}"
        raise BadRequestError(f"{told}; a picture is one of uint8, [height, width, 3]")
    file = io.BytesIO()
    Image.fromarray(flat).save(file, "PNG", compress_level=0)
    return file.getvalue()


def _from_json(value: Any, column: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise BadRequestError(f"{column} is no JSON: {error}") from None


def _finish(answer: Mapping[str, Any]) -> str:
    """Return the reason for the end of an answer; of the first one, of several."""
    return str(answer["choices"][0]["finish_reason"])
