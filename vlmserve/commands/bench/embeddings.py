"""`vlmserve bench embeddings`: vectors of texts and pictures, beside transformers, and over HTTP beside this process.

transformers computes as Sentence Transformers does: batches padded to their longest input, the state of the last token,
divided by its length.
"""

from __future__ import annotations

import argparse
import io
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from PIL import Image

from vlmserve.commands.bench.figures import Measure, Spread, bench_parser, in_turns, ratios, show_and_write
from vlmserve.commands.bench.media import draw_picture
from vlmserve.commands.bench.reference import load_reference
from vlmserve.commands.client.own_server import OwnServer
from vlmserve.commands.offline.llm import LLM
from vlmserve.config.flags import positive
from vlmserve.config.model_path import local_folder
from vlmserve.frontend.pooled import embed_prompt
from vlmserve.frontend.requests import ChatPrompt
from vlmserve_common.errors import EngineError

_ABOUT = """\
Embeddings of texts and pictures: this engine beside transformers on the same checkpoint in float32, a second pass over
the same pictures beside the first one, and a server's batches beside the engine in this process.
"""
_TEXTS, _PICTURES, _AGAIN, _API = 1.3, 1.3, 20.0, 0.85
_TEXT = "the lake mountains and behind a red blue picture of what near in it small large two house green sky"


def main(argv: Sequence[str]) -> int:
    """Measure, and print a line for each figure."""
    parser = bench_parser("embeddings", _ABOUT, rounds=3, parts=("texts", "pictures", "api"))

    def number(name: str, default: int, text: str) -> None:
        parser.add_argument(name, type=positive, default=default, metavar="N", help=text)

    parser.add_argument(
        "--model", metavar="FOLDER", default="", help="checkpoint folder; the built-in model if left out"
    )
    number("--texts", 256, "texts in a round")
    number("--tokens", 64, "tokens of each text, about")
    number("--pictures", 64, "pictures in a round")
    number("--side", 448, "side of the pictures in pixels")
    number("--batch", 32, "inputs that transformers computes together")
    number("--body", 64, "texts in a request to the server")
    number("--connections", 4, "requests to the server at a time")
    parser.add_argument(
        "--threads", type=positive, metavar="N", help="CPU threads of either engine; all cores if left out"
    )
    args = parser.parse_args(argv)
    print(f"{args.rounds} rounds; median (least to most)")
    with _engine(args) as llm:
        inputs = _Inputs(args, llm)
        made = {"texts": _texts, "pictures": _pictures, "api": _api}
        show_and_write(args, {part: made[part](args, llm, inputs) for part in args.parts})
    return 0


class _Inputs:
    """Makes inputs that no cache knows."""

    def __init__(self, args: argparse.Namespace, llm: LLM) -> None:
        self._args, self._tokenizer, self._rounds = args, llm.builder.tokenizer, 0

    def texts(self) -> list[str]:
        self._rounds += 1
        rng = np.random.default_rng([1, self._rounds])
        said = (" ".join(rng.choice(_TEXT.split(), self._args.tokens).tolist()) for _ in range(self._args.texts))
        return [self._tokenizer.decode(self._tokenizer.encode(one)[: self._args.tokens]) for one in said]

    def pictures(self) -> list[bytes]:
        self._rounds += 1
        return [draw_picture(self._args.side, [2, self._rounds, at]) for at in range(self._args.pictures)]


def _engine(args: argparse.Namespace) -> LLM:
    return LLM(args.model, task="embed", dtype="float32", num_threads=args.threads)


def _texts(args: argparse.Namespace, llm: LLM, inputs: _Inputs) -> Iterator[Measure]:
    reference = _Reference(args, llm)
    close(reference.vectors(inputs_ := inputs.texts()[:4]), llm.embed(inputs_))
    times = in_turns(
        {"ours": lambda: llm.embed(inputs.texts()), "theirs": lambda: reference.vectors(inputs.texts())}, args.rounds
    )
    about = f"{args.texts} texts of about {args.tokens} tokens; transformers takes {args.batch} at a time"
    yield _rate("this engine", times["ours"].wall, args.texts, "texts/s", about)
    yield _rate("transformers", times["theirs"].wall, args.texts, "texts/s", about)
    yield Measure(
        name="beside transformers", spread=ratios(times["theirs"].wall, times["ours"].wall), target=_TEXTS, about=about
    )


def _pictures(args: argparse.Namespace, llm: LLM, inputs: _Inputs) -> Iterator[Measure]:
    reference, shown = _Reference(args, llm), list[bytes]()

    def asked() -> list[dict[str, Any]]:
        return [{"image": picture} for picture in shown]

    def first() -> None:
        shown[:] = inputs.pictures()
        llm.embed(asked())

    shown[:] = inputs.pictures()[:2]
    close(reference.vectors(shown), llm.embed(asked()))
    times = in_turns(
        {
            "ours": first,
            "again": lambda: llm.embed(asked()),
            "theirs": lambda: reference.vectors(inputs.pictures()),
        },
        args.rounds,
    )
    about = f"{args.pictures} pictures of {args.side}x{args.side}; transformers takes {args.batch} at a time"
    for name, key in (
        ("this engine", "ours"),
        ("this engine, the same once more", "again"),
        ("transformers", "theirs"),
    ):
        yield _rate(name, times[key].wall, args.pictures, "pictures/s", about)
    for name, slow, quick, target in (
        ("beside transformers", "theirs", "ours", _PICTURES),
        ("the same once more, beside the first pass", "ours", "again", _AGAIN),
    ):
        yield Measure(name=name, spread=ratios(times[slow].wall, times[quick].wall), target=target, about=about)


def _api(args: argparse.Namespace, llm: LLM, inputs: _Inputs) -> Iterator[Measure]:
    words = [*([args.model] if args.model else []), "--task", "embed", "--dtype", "float32", "--log-level", "warning"]
    words += ["--num-threads", str(args.threads)] if args.threads else []
    with OwnServer(words, startup_timeout_s=600.0) as server, ThreadPoolExecutor(args.connections) as pool:

        def served() -> None:
            texts = inputs.texts()
            bodies = [texts[at : at + args.body] for at in range(0, len(texts), args.body)]
            assert sum(pool.map(lambda body: len(_post(server.base_url, body)), bodies)) == len(texts)

        times = in_turns({"here": lambda: llm.embed(inputs.texts()), "served": served}, args.rounds)
    about = f"{args.texts} texts in requests of {args.body}, {args.connections} at a time"
    yield _rate("in this process", times["here"].wall, args.texts, "texts/s", about)
    yield _rate("over HTTP", times["served"].wall, args.texts, "texts/s", about)
    yield Measure(
        name="over HTTP beside in this process",
        spread=ratios(times["here"].wall, times["served"].wall),
        target=_API,
        about=about,
    )


def _rate(name: str, seconds: Sequence[float], count: int, unit: str, about: str) -> Measure:
    return Measure(name=name, unit=unit, spread=Spread.of([count / one for one in seconds]), about=about)


def _post(url: str, texts: Sequence[str]) -> list[Any]:
    body = json.dumps({"input": texts, "encoding_format": "base64"}).encode()
    request = Request(f"{url}/v1/embeddings", body, {"Content-Type": "application/json"})
    with urlopen(request) as reply:
        return list(json.load(reply)["data"])


class _Reference:
    """transformers' model and processor of the same checkpoint, with the prompts of ours."""

    def __init__(self, args: argparse.Namespace, llm: LLM) -> None:
        folder = local_folder(args.model) or Path(args.model)
        if args.threads:
            torch.set_num_threads(args.threads)
        self._model = load_reference(folder, dtype=torch.float32).model
        from transformers import AutoProcessor  # which `load_reference` makes importable

        load: Callable[..., Any] = AutoProcessor.from_pretrained
        self._processor = load(folder)
        self._processor.tokenizer.padding_side = "right"
        self._batch, self._llm = args.batch, llm

    @torch.inference_mode()
    def vectors(self, inputs: Sequence[str | bytes]) -> np.ndarray:
        """Return the vectors of texts or picture files, float32 [inputs, width]."""
        return np.concatenate([self._some(inputs[at : at + self._batch]) for at in range(0, len(inputs), self._batch)])

    def _some(self, inputs: Sequence[str | bytes]) -> np.ndarray:
        images = [Image.open(io.BytesIO(one)).convert("RGB") for one in inputs if isinstance(one, bytes)]
        texts = [self._prompt(one) for one in inputs]
        made = self._processor(text=texts, images=images or None, padding=True, return_tensors="pt")
        self._model.rope_deltas = None
        states = self._model(**made).last_hidden_state
        last = made["attention_mask"].sum(1) - 1
        rows = states[torch.arange(len(states)), last]
        return torch.nn.functional.normalize(rows, dim=1).numpy()

    def _prompt(self, one: str | bytes) -> str:
        content = one if isinstance(one, str) else [{"type": "image"}]
        prompt = embed_prompt(self._llm.builder.limits.task, content)
        return self._llm.builder.template.render(prompt.messages) if isinstance(prompt, ChatPrompt) else str(one)


def close(theirs: np.ndarray, ours: np.ndarray) -> None:
    """Raise EngineError unless vectors are the same, but for a picture's resizing."""
    if (distance := float(np.max(1 - np.sum(theirs * ours, axis=1)))) > 1e-3:
        raise EngineError(f"vectors differ from those of transformers: cosine distance {distance:.2g}")
