"""Captions by the engine in this process."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import blake3

from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.run import CaptionStopped
from vlmserve.commands.offline.async_llm import AsyncLLM
from vlmserve.config.model_path import DEFAULT_MODEL_NAME, resolve_model
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.openai.answers import AnswerHead, AnswerWriter
from vlmserve.frontend.openai.convert import to_generate_request
from vlmserve.frontend.openai.json_bodies import checked
from vlmserve.frontend.openai.protocol import ChatCompletionRequest
from vlmserve.frontend.parsers.answer import AnswerReading, choose_formats
from vlmserve.frontend.request_builder import ChatPrompt
from vlmserve.frontend.stage import stage_limits
from vlmserve_common.checkpoint.adapter_file import read_adapter
from vlmserve_common.compute.devices import resolve_device
from vlmserve_common.errors import BadRequestError, EngineUnavailableError, SettingsError

MOST_CHOICES = 128
_SAMPLED_BYTES = 1 << 20
_ENCODER_CACHE_MIB = 64
_NO_MESSAGES = [{"role": "user", "content": "-"}]


class LocalCaptioner:
    """A `Captioner` with an engine of its own, `llm`. concurrency: requests at a time.

    nothing_twice: see `CaptionCommand`. Raises CheckpointError, EngineError or SettingsError.
    """

    engines = 1

    def __init__(self, settings: ServerSettings, *, concurrency: int, nothing_twice: bool = False) -> None:
        weights = _weights_digest(resolve_model(settings.engine.model, settings.engine.revision))
        self.model = settings.served_model_name or settings.engine.model or DEFAULT_MODEL_NAME
        engine = settings.engine
        names = [name for name, _ in engine.adapters_at_start]
        if len(names) > 1:
            raise SettingsError(f"--lora-paths has {len(names)} adapters; captions are made by one")
        self._lora = names[0] if names else None
        if engine.max_decode_slowdown is None:  # nobody reads along
            engine = replace(engine, max_decode_slowdown=0.0)
        if nothing_twice and resolve_device(engine.device).type == "cpu":
            # a CPU encodes little at a time, and no picture comes again: a small cache is enough
            asked = engine.encoder_cache_mib
            small = _ENCODER_CACHE_MIB if asked is None else min(asked, _ENCODER_CACHE_MIB)
            engine = replace(engine, encoder_cache_mib=small)
        self.llm = AsyncLLM(
            engine,
            stage_limits(settings),
            joined=True,
            max_pending=concurrency * MOST_CHOICES,
            log_level=settings.log_level,
        )
        self._formats = choose_formats(
            settings.tool_call_parser, settings.reasoning_parser, self.llm.builder.template.text
        )
        how = f"{self.llm.info.dtype} {self.llm.args.sampling_defaults} {self.llm.describe_media_settings()}"
        if engine.chat_template is not None:
            how += f" {self.llm.builder.template.text}"
        if engine.merged_adapter is not None:
            how += f" {read_adapter(engine.merged_adapter, max_rank=engine.max_lora_rank).digest}"
        if self._lora is not None:
            how += f" {self.llm.adapter_digest(self._lora)}"
        self.identity = f"{weights} {blake3.blake3(how.encode()).hexdigest(16)}"

    async def start(self) -> None:
        """Do nothing: the engine is ready."""

    async def ask(self, request: ChatRequest) -> dict[str, Any]:
        body = {"model": self.model, **request.options, "messages": _NO_MESSAGES}
        chat = checked(body, ChatCompletionRequest)
        head = AnswerHead(id=f"chatcmpl-{uuid.uuid4().hex}", created=int(time.time()), model=self.model)
        wanted = to_generate_request(chat, head.id, max_n=MOST_CHOICES, find_file=_no_file)
        assert isinstance(wanted.prompt, ChatPrompt)
        wanted = replace(wanted, prompt=replace(wanted.prompt, messages=request.messages))
        writer = AnswerWriter(
            head,
            self.llm.builder.tokenizer,
            n=wanted.n,
            logprobs=bool(chat.logprobs),
            mm_report=bool(chat.return_mm_report),
            reading=AnswerReading(reasoning=self._formats.reasoning),
        )
        try:
            async with contextlib.aclosing(self.llm.generate(wanted, lora=self._lora)) as outputs:
                return await writer.whole(outputs)
        except EngineUnavailableError as error:
            raise CaptionStopped(str(error)) from None

    def notes(self) -> list[str]:
        return []

    async def close(self) -> None:
        await asyncio.to_thread(self.llm.close)


def _no_file(file_id: str) -> Any:
    raise BadRequestError(f"there are no uploaded files here, such as {file_id!r}", code="file_not_found")


def _weights_digest(folder: Path) -> str:
    """Return a digest of weights and tokenizer: of all names and sizes, and of both ends of each file."""
    digest = blake3.blake3()
    for path in sorted(folder.iterdir()):
        if path.suffix not in (".json", ".jinja", ".safetensors"):
            continue
        size = path.stat().st_size
        digest.update(f"{path.name} {size}\n".encode())
        with path.open("rb") as file:
            digest.update(file.read(_SAMPLED_BYTES))
            file.seek(max(0, size - _SAMPLED_BYTES))
            digest.update(file.read(_SAMPLED_BYTES))
    return digest.hexdigest(16)
