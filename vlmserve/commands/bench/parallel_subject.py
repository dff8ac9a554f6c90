"""Engines that `vlmserve bench parallel` compares: processes of one thread, random weights, text alone."""

from __future__ import annotations

import itertools
import json
import statistics
import time
import urllib.request
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from vlmserve.commands.bench.random_checkpoint import TEXT_SIZES, copy_built_in_settings
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.fields import flag
from vlmserve.frontend.request_builder import TokensPrompt
from vlmserve.frontend.sampling import SamplingOverrides
from vlmserve.ipc.messages import BatchTokenOutput, SchedulerOutput
from vlmserve_common.checkpoint.reader import read_json
from vlmserve_common.parallel.group import ProcessGroup

_TEXT_IDS = 1600  # of the built-in model's tokenizer, without special ones
_SHORT = 8  # tokens of prompts that are there to be continued


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """requests: that decode together, `steps` tokens each. prompt: tokens of one whose prefill is timed."""

    requests: int
    steps: int
    prompt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchanged:
    """Between the ranks of a stage, or from one stage to the next, while so many steps computed so many tokens:
    exchanges, and the bytes of the tensors in them, by name."""

    steps: int
    tokens: int
    counts: Counter[str]
    bytes: Counter[str]


class Subject(ABC):
    """One alternative, with `requests` requests at a time. Close it."""

    def __init__(self, work: Work, requests: int) -> None:
        self._work, self.requests = work, requests

    @abstractmethod
    def decode_seconds(self) -> float:
        """Of a step in which all requests get a token."""

    def prefill_seconds(self) -> float:
        """Of a prompt's token, where every request has such a prompt."""
        return self._seconds(self._prompts(self._work.prompt), 1) / (self._work.prompt * self.requests)

    @abstractmethod
    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """Answers of so many tokens to ids int64 [B, L], computed together."""

    @abstractmethod
    def close(self) -> None:
        """End its processes."""

    def _seconds(self, prompts: np.ndarray, tokens: int) -> float:
        began = time.perf_counter()
        self.answer(prompts, tokens)
        return time.perf_counter() - began

    def _prompts(self, tokens: int) -> np.ndarray:
        """Ids int64 [requests, tokens] of random text."""
        return np.random.default_rng([self.requests, tokens]).integers(0, _TEXT_IDS, (self.requests, tokens))


class _Watched(LLM):
    """times: when tokens came, by request."""

    def __init__(self, folder: str, clock: Callable[[], float], **settings: Any) -> None:
        self.times: defaultdict[str, list[float]] = defaultdict(list)
        self._clock = clock
        super().__init__(folder, **settings)

    def _take(self, batch: SchedulerOutput) -> None:
        assert isinstance(batch, BatchTokenOutput)
        now = self._clock()
        for output in batch.outputs:
            self.times[output.rid].append(now)
        super()._take(batch)


class Engine(Subject):
    """Without a server. settings: of `EngineArgs`; as many requests for each stage of a pipeline. clock: that steps are
    timed by, in seconds."""

    def __init__(
        self, folder: Path, work: Work, clock: Callable[[], float] = time.perf_counter, **settings: Any
    ) -> None:
        super().__init__(work, work.requests * settings.get("pp_size", 1))
        self._llm = _Watched(str(folder), clock, **(_settings(work, self.requests) | settings))

    def decode_seconds(self) -> float:
        """See `Subject`: the median time between two tokens of a request."""
        self._llm.times.clear()
        self.answer(self._prompts(_SHORT), 1 + self._work.steps)
        return statistics.median(
            behind - before for times in self._llm.times.values() for before, behind in itertools.pairwise(times)
        )

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """See `Subject`."""
        wrapped = [TokensPrompt(ids=tuple(ids.tolist())) for ids in prompts]
        self._llm.generate(wrapped, SamplingOverrides(temperature=0.0, max_new_tokens=tokens, ignore_eos=True))

    def exchanged(self) -> Exchanged:
        """In one round of decoding, by the first rank."""
        ranks = self._llm.engine.ranks
        assert ranks is not None
        group = ranks.group or ranks.comm.behind
        assert isinstance(group, ProcessGroup)
        steps, counts, sizes = self._llm.stats().forward_steps_total, Counter(group.counts), Counter(group.bytes)
        self.answer(self._prompts(_SHORT), 1 + self._work.steps)
        return Exchanged(
            steps=self._llm.stats().forward_steps_total - steps,
            tokens=self.requests * (_SHORT + self._work.steps),
            counts=group.counts - counts,
            bytes=group.bytes - sizes,
        )

    def close(self) -> None:
        """See `Subject`."""
        self._llm.close()


class Server(Subject):
    """With so many replicas, and as many requests for each."""

    def __init__(self, folder: Path, work: Work, replicas: int) -> None:
        super().__init__(work, work.requests * replicas)
        words = [str(folder)]
        for name, value in _settings(work, work.requests).items():
            words += [flag(name)] if value is True else [flag(name), str(value)]
        words += ["--dp-size", str(replicas), "--served-model-name", "bench", "--log-level", "warning"]
        self._server = OwnServer(words, startup_timeout_s=600.0)
        self._threads = ThreadPoolExecutor(self.requests)

    def decode_seconds(self) -> float:
        """See `Subject`: of whole answers, their short prompts included."""
        return self._seconds(self._prompts(_SHORT), 1 + self._work.steps) / (1 + self._work.steps)

    def answer(self, prompts: np.ndarray, tokens: int) -> None:
        """See `Subject`."""

        def ask(ids: np.ndarray) -> None:
            body = {
                "model": "bench",
                "prompt": ids.tolist(),
                "max_tokens": tokens,
                "temperature": 0.0,
                "ignore_eos": True,
            }
            request = urllib.request.Request(
                f"{self._server.base_url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            urllib.request.urlopen(request, timeout=600).read()

        list(self._threads.map(ask, prompts))

    def close(self) -> None:
        """See `Subject`."""
        self._threads.shutdown()
        self._server.close()


def _settings(work: Work, requests: int) -> dict[str, Any]:
    """Of an engine, or of a replica."""
    longest = max(work.prompt, _SHORT) + work.steps + 64
    return {
        "device": "cpu",
        "dtype": "bfloat16",
        "load_format": "dummy",
        "num_threads": 1,
        "disable_radix_cache": True,
        "max_running_requests": requests,
        "max_model_len": longest,
        "max_total_tokens": requests * longest,
        "chunked_prefill_size": 256,
        "max_decode_slowdown": 0,
        "max_step_s": 0,
    }


def dense_folder(folder: Path, layers: int, **sizes: Any) -> Path:
    """Of a decoder like Qwen3-0.6B's with so many layers, without weights. sizes: of it that differ."""
    return _write(folder, "qwen3_vl", {"num_hidden_layers": layers} | sizes)


def moe_folder(folder: Path, layers: int) -> Path:
    """Of a mixture of experts in the proportions of Qwen3-VL-30B-A3B, half as wide; without weights."""
    return _write(folder, "qwen3_vl_moe", MOE_SIZES | {"num_hidden_layers": layers})


# Of 128 experts each token goes through 8, and each is three eighths as wide as a token's row.
MOE_SIZES: dict[str, Any] = {
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "num_key_value_heads": 2,
    "vocab_size": 16384,  # a head that is a small part of the whole, as there
}


def _write(folder: Path, family: str, sizes: Mapping[str, Any]) -> Path:
    copy_built_in_settings(folder)
    config = read_json(folder, "config.json")
    config["model_type"] = config["vision_config"]["model_type"] = family
    config["architectures"] = [
        "Qwen3VLMoeForConditionalGeneration" if family.endswith("moe") else "Qwen3VLForConditionalGeneration"
    ]
    config["tie_word_embeddings"] = False
    config["text_config"] |= TEXT_SIZES | {"model_type": f"{family}_text", "tie_word_embeddings": False, **sizes}
    config["vision_config"] |= {
        "out_hidden_size": TEXT_SIZES["hidden_size"],
        "depth": 1,
        "deepstack_visual_indexes": [0],
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder
