"""A scheduler without a model behind the real front end: real template, tokenizer, processors, manager, detokenizer."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import openai
import uvicorn
from PIL import Image
from tokenizers import Tokenizer

from tests.processors.helpers import encoded
from tests.vlmserve.tiny_tokenizer import write_tokenizer_folder
from vision.cache.stats import PoolStats, TierStats
from vlmserve.api.app import ApiFrontend, make_frontend
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.engine.control import EngineControl
from vlmserve.engine.profiling import Profiler
from vlmserve.frontend.detokenizer import DetokenizerManager
from vlmserve.ipc.control_messages import ControlRefused, ControlRequest, ControlResult
from vlmserve.ipc.messages import (
    AbortReq,
    BatchTokenizedGenerateReqInput,
    BatchTokenOutput,
    EncodedItem,
    EncodeOutput,
    EncodeReqInput,
    ExpertStats,
    FinishReason,
    HandoverStats,
    SchedulerInput,
    SchedulerStats,
    StageTimes,
    StepStats,
    TokenizedGenerateReqInput,
    TokenLogprobs,
    TokenOutput,
)
from vlmserve.ipc.weight_messages import WeightsDone, WeightsOrder
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer, load_text_tokenizer

MODEL = "org/tiny"
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": MODEL, "messages": HI, "max_tokens": 4, "temperature": 0}
CONTEXT = 256
ROW_WIDTH = 8
TEST_HOST = "testserver"  # what Starlette's client calls every server
WAIT_S = 20.0  # a bound for waits on other threads, never waited for when all is well

Script = Callable[[TokenizedGenerateReqInput, int], int]


class FakeWeights:
    """Notes all orders, and refuses those whose type it is given a reason for."""

    are_there = True

    def __init__(self) -> None:
        self.orders: list[WeightsOrder] = []
        self.refuses: dict[type, ControlRefused] = {}
        self.missing = 0

    def handle(self, order: WeightsOrder) -> WeightsDone | ControlRefused:
        self.orders.append(order)
        return self.refuses.get(type(order)) or WeightsDone(nbytes=8, missing=self.missing)


class FakeScheduler:
    """Answers each request token by token, as `script(request, index)` says, one event loop turn a token.

    encodes_pictures: says in its stages that pictures were encoded. pause_after: requests stop before the token of that
    index until they are aborted, or `lift_pauses`. encodes: media to be encoded ahead of time, which are answered at
    once unless pause_encodes.
    """

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.eos = tokenizer.id_of("<|im_end|>")
        self.requests: list[TokenizedGenerateReqInput] = []
        self.encodes: list[EncodeReqInput] = []
        self.pause_encodes = False
        self.aborts: list[AbortReq] = []
        self.pause_after: int | None = None
        self.lift_pauses = False
        self.fail_with: FinishReason | None = None
        self.encodes_pictures = False
        self.answers_stats = True
        self.script: Script = self.random_word
        self.frontend: ApiFrontend | None = None
        self._detokenizer = DetokenizerManager(tokenizer)
        self._changed = threading.Condition()
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self.weights, self.retracted = FakeWeights(), False
        self.control = EngineControl(self, Profiler(), self.weights, device="cpu", dtype="float32")

    @property
    def num_active(self) -> int:
        return len(self._tasks)

    def random_word(self, request: TokenizedGenerateReqInput, index: int) -> int:
        """A printable token that depends on the prompt, the seed (unless greedy) and the index."""
        params = request.sampling_params
        forced = max(params.logit_bias.items(), key=lambda pair: pair[1], default=(0, 0))
        if forced[1] == 100:
            return forced[0]
        seed = params.seed if params.temperature > 0 else 0
        digest = hashlib.sha256(f"{request.input_ids.tolist()} {seed} {index}".encode()).digest()
        ids = self.tokenizer.encode("the list of files is moved to other side before result written red square blue")
        return ids[digest[0] % len(ids)]

    def say(self, text: str) -> None:
        """Answer everything with this text, then the end token."""
        ids = [*self.tokenizer.encode(text), self.eos]
        self.script = lambda request, index: ids[min(index, len(ids) - 1)]

    def send(self, message: SchedulerInput) -> None:
        loop = asyncio.get_running_loop()
        if isinstance(message, BatchTokenizedGenerateReqInput):
            for request in message.requests:
                self.send(request)
        elif isinstance(message, TokenizedGenerateReqInput):
            self._note(self.requests, message)
            self._tasks[message.rid] = loop.create_task(self._answer(message))
        elif isinstance(message, EncodeReqInput):
            self._note(self.encodes, message)
            if not self.pause_encodes:
                loop.call_soon(self.frontend.handle, self._encoded(message))
        elif isinstance(message, AbortReq):
            task = self._tasks.pop(message.rid, None)
            if task is not None:
                task.cancel()
                if not message.finished:
                    self._deliver(self._output(message.rid, (), FinishReason(type="abort"), 1, 0))
            self._note(self.aborts, message)

    # what operators ask: the real control of a fake engine

    def handle(self, message: AbortReq) -> None:
        self.send(message)

    def step(self) -> bool:
        return False

    def drain(self) -> None:
        pass

    def retract_all(self) -> None:
        self.retracted = True

    def stats(self) -> SchedulerStats:
        return make_stats(num_running_reqs=len(self._tasks))

    def flush_cache(self) -> int:
        return 32

    async def ask(self, question: ControlRequest) -> ControlResult:
        if not self.answers_stats:
            await asyncio.Event().wait()
        return self.control.handle(question)

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait in another thread for something about `requests` or `aborts`."""
        with self._changed:
            assert self._changed.wait_for(condition, WAIT_S), "timed out"

    def _note(self, kept: list[Any], message: Any) -> None:
        with self._changed:
            kept.append(message)
            self._changed.notify_all()

    async def _answer(self, request: TokenizedGenerateReqInput) -> None:
        params, length = request.sampling_params, len(request.input_ids)
        if self.fail_with is not None:
            del self._tasks[request.rid]
            self._deliver(self._output(request.rid, (), self.fail_with, length, 0))
            return
        if not params.max_new_tokens:
            await asyncio.sleep(0)
            del self._tasks[request.rid]
            output = self._output(request.rid, (), FinishReason(type="length"), length, 0)
            self._deliver(output._replace(first=True, stages=self._stages(request, 0)))
        for index in range(params.max_new_tokens):
            if index == self.pause_after:
                while not self.lift_pauses:
                    await asyncio.sleep(0.002)
            await asyncio.sleep(0)
            token = self.script(request, index)
            finish = None
            if (token == self.eos and not params.ignore_eos) or token in params.stop_token_ids:
                finish = FinishReason(type="stop", matched=token)
            elif index + 1 == params.max_new_tokens:
                finish = FinishReason(type="length")
            output = self._output(request.rid, (token,), finish, length, index + 1)
            if index == 0:
                output = output._replace(first=True, stop=params.stop, skip_special_tokens=params.skip_special_tokens)
            if request.num_logprobs is not None:
                top = tuple((token + i) % self.tokenizer.num_ids for i in range(request.num_logprobs))
                entry = TokenLogprobs(
                    token_id=token,
                    logprob=-0.5,
                    top_ids=top,
                    top_logprobs=tuple(-0.5 - i for i in range(request.num_logprobs)),
                )
                output = output._replace(logprobs=(entry,))
            if index == 0 or finish is not None:
                output = output._replace(stages=self._stages(request, index))
            if finish is not None:
                del self._tasks[request.rid]
            self._deliver(output)
            if finish is not None or request.rid not in self._tasks:
                return

    def _stages(self, request: TokenizedGenerateReqInput, index: int) -> StageTimes:
        encoded = self.encodes_pictures and request.mm_inputs is not None
        return StageTimes(
            queue_s=0.25,
            encode_s=0.5 if encoded else None,
            encode_cached=False if encoded else None,
            prefill_s=1.0,
            decode_s=float(index),
            total_s=1.75 + index,
        )

    def _encoded(self, message: EncodeReqInput) -> EncodeOutput:
        if self.fail_with is not None:
            return EncodeOutput(rid=message.rid, items=(), error=self.fail_with)
        items = [
            EncodedItem(modality=item.modality, temporal_patches=item.grid_thw[0], encoded=1, patches_encoded=24)
            for item in message.items
        ]
        return EncodeOutput(rid=message.rid, items=tuple(items))

    def _output(
        self, rid: str, ids: tuple[int, ...], finish: FinishReason | None, length: int, done: int
    ) -> TokenOutput:
        return TokenOutput(
            rid=rid,
            token_ids=ids,
            finish_reason=finish,
            prompt_tokens=length,
            completion_tokens=done,
            cached_tokens=length // 2,
        )

    def _deliver(self, output: TokenOutput) -> None:
        texts, aborts = self._detokenizer.process(BatchTokenOutput(outputs=(output,)))
        for abort in aborts:
            self.send(abort)
        self.frontend.handle(texts)


@dataclass
class Served:
    """A front end and its fake scheduler."""

    frontend: ApiFrontend
    scheduler: FakeScheduler

    @property
    def app(self) -> Any:
        return self.frontend.app

    @property
    def prompt(self) -> str:
        """The prompt of the last request."""
        return self.scheduler.tokenizer.decode(ids_of(self.scheduler.requests[-1]), skip_special_tokens=False)

    def assert_idle(self) -> None:
        """Nothing is left of any request."""
        assert self.frontend.manager.num_pending == 0
        assert self.scheduler.num_active == 0
        assert self.scheduler._detokenizer.num_active == 0


def make_served(folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Served:
    """Serve the folder of `write_checkpoint_folder`."""
    args = EngineArgs(model=str(folder), **{"media_processes": 0, **(engine or {})})
    scheduler = FakeScheduler(load_text_tokenizer(folder))
    frontend = make_frontend(
        ServerSettings(engine=args, **{"allowed_hosts": TEST_HOST, **settings}),
        max_model_len=CONTEXT,
        model_name=MODEL,
        send=scheduler.send,
        control=scheduler.ask,
    )
    scheduler.frontend = frontend
    return Served(frontend, scheduler)


@contextlib.contextmanager
def serving(folder: Path, engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[Served]:
    """Serve a folder; in the end nothing may be left of any request."""
    served = make_served(folder, engine, **settings)
    yield served
    served.assert_idle()
    asyncio.run(served.frontend.close())


def write_checkpoint_folder(folder: Path) -> Path:
    """Everything of a Qwen2-VL checkpoint but its weights."""
    write_tokenizer_folder(folder)
    raw = Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = {
        "model_type": "qwen2_vl",
        "vocab_size": 512,
        "image_token_id": raw.token_to_id("<|image_pad|>"),
        "video_token_id": raw.token_to_id("<|video_pad|>"),
        "vision_start_token_id": raw.token_to_id("<|vision_start|>"),
        "vision_end_token_id": raw.token_to_id("<|vision_end|>"),
        "vision_config": {
            "patch_size": 14,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "hidden_size": ROW_WIDTH,
        },
    }
    (folder / "config.json").write_text(json.dumps(config))
    pictures = {"patch_size": 14, "merge_size": 2, "temporal_patch_size": 2, "min_pixels": 784, "max_pixels": 50176}
    (folder / "preprocessor_config.json").write_text(json.dumps(pictures))
    return folder


def make_stats(**fields: int) -> SchedulerStats:
    zero = {
        **dict.fromkeys(SchedulerStats.__dataclass_fields__, 0),
        "replicas": (),
        "encoder": PoolStats(disk=TierStats(hits=3)),
        "steps": StepStats(),
        "experts": ExpertStats(),
        "handover": HandoverStats(),
    }
    return SchedulerStats(**{**zero, "kv_total_tokens": 100, "kv_free_tokens": 60, "kv_cached_tokens": 10, **fields})


def png_url(colour: tuple[int, int, int] = (200, 60, 30), size: tuple[int, int] = (56, 28)) -> str:
    return "data:image/png;base64," + base64.b64encode(encoded(Image.new("RGB", size, colour))).decode()


def ids_of(request: TokenizedGenerateReqInput) -> list[int]:
    assert isinstance(request.input_ids, np.ndarray)
    assert request.input_ids.dtype == np.int64
    return request.input_ids.tolist()


@contextlib.contextmanager
def real_server(app: Any) -> Iterator[int]:
    """uvicorn in a thread, on a port that the system chooses; yields the port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning", lifespan="off"))
    started = threading.Event()
    startup = server.startup

    async def startup_and_tell(sockets: Any = None) -> None:
        await startup(sockets)
        started.set()

    server.startup = startup_and_tell
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        assert started.wait(WAIT_S)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(WAIT_S)
        assert not thread.is_alive()


def http_scope(path: str, headers: Sequence[tuple[bytes, bytes]]) -> dict[str, Any]:
    """A POST request as an ASGI server gives it to an application, for tests that play the server."""
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    return scope | {"scheme": "http", "root_path": "", "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 2)}


def official_client(port: int, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=key, max_retries=0, timeout=WAIT_S)
