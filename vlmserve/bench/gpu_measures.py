"""The figures of `vlmserve bench gpu`: ours and transformers', which take turns on the same device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vision.towers.runner import pixel_values
from vlmserve.bench.gpu_subject import Ours, Sizes, Theirs, finish, make_prompts
from vlmserve.bench.interleaved import Timing, in_turns, ratios
from vlmserve.bench.load import make_requests
from vlmserve.bench.vision_reference import ReferenceTower, check_rows
from vlmserve.bench.vision_subject import PLENTY, Subject, take_rows

_MIB = 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """Of rounds."""

    median: float
    least: float
    most: float

    @staticmethod
    def of(values: Sequence[float]) -> Spread:
        """Of at least one value."""
        return Spread(median=statistics.median(values), least=min(values), most=max(values))


@dataclass(frozen=True, kw_only=True, slots=True)
class Figure:
    """ours, theirs: in `unit`. ratio: how many times as good ours is, round by round. about: what else to know.

    theirs and ratio are None where transformers has nothing like it.
    """

    name: str
    unit: str
    ours: Spread
    theirs: Spread | None = None
    ratio: Spread | None = None
    about: str = ""


class Bench:
    """Both engines, loaded one after the other so that each one's memory can be told. Close it."""

    def __init__(
        self, folder: Path, sizes: Sizes, *, device: torch.device, dtype: torch.dtype, rounds: int, seed: int = 0
    ) -> None:
        self._sizes, self._device, self._dtype, self._rounds, self._seed = sizes, device, dtype, rounds, seed
        self._folder = folder
        with self._peak() as ours_peak:
            self._ours = Ours(folder, sizes, device=device, dtype=dtype)
            self._largest(self._ours.answer)
        with self._peak() as theirs_peak:
            self._theirs = Theirs(folder, device=device, dtype=dtype)
            self._largest(self._theirs.answer)
        self._peaks = [*ours_peak, *theirs_peak]

    def close(self) -> None:
        """End the engine's threads."""
        self._ours.llm.close()

    def memory(self) -> list[Figure]:
        """Peak of what torch had allocated, weights, KV cache and all; of a GPU only."""
        if not self._peaks:
            return []
        ours, theirs = (Spread.of([peak / _MIB]) for peak in self._peaks)
        batch = max(self._sizes.batches)
        return [
            Figure(
                name=f"peak memory, {batch} answers at a time",
                unit="MiB",
                ours=ours,
                theirs=theirs,
                ratio=Spread.of([theirs.median / ours.median]),
                about=f"ours with a KV cache of {self._sizes.kv_tokens} tokens, allocated at the start",
            )
        ]

    def tower(self) -> list[Figure]:
        """Pictures to rows, in one batch. The rows are compared first."""
        subject = Subject(self._folder, device=self._device, dtype=self._dtype)
        side = self._sizes.side
        media = [subject.picture(side, side, seed=self._seed + number) for number in range(self._sizes.pictures)]
        patches = [patch for medium in media for patch in medium.patches]
        pixels = pixel_values(patches, torch.device("cpu"))
        grids = [medium.grid_thw for medium in media]
        reference = ReferenceTower(self._theirs.model, device=self._device, dtype=self._dtype)
        off = check_rows(torch.cat(subject.runner.encode(patches)), reference.encode(pixels, grids))
        found = self._turns(lambda: subject.runner.encode(patches), lambda: reference.encode(pixels, grids))
        about = f"{len(pixels)} patches of {len(media)} pictures; rows are within {off:.2g} of each other"
        return [_rate("vision tower", "patches/s", len(pixels), found, about)]

    def prefill(self) -> list[Figure]:
        """One long prompt and a token."""
        tokens = self._sizes.long_prompt
        prompts = make_prompts(self._theirs.tokenizer, 1, tokens, self._seed)
        found = self._turns(lambda: self._ours.answer(prompts, 1), lambda: self._theirs.answer(prompts, 1))
        return [_rate("prefill", "tokens/s", tokens, found, f"one prompt of {tokens} tokens")]

    def decode(self) -> list[Figure]:
        """Short prompts answered together."""
        sizes, made = self._sizes, []
        for batch in sizes.batches:
            prompts = make_prompts(self._theirs.tokenizer, batch, sizes.short_prompt, self._seed)
            answers = [who.answer(prompts, sizes.answer) for who in (self._ours, self._theirs)]
            same = sum(ours == theirs for ours, theirs in zip(*answers, strict=True))
            found = self._turns(
                partial(self._ours.answer, prompts, sizes.answer), partial(self._theirs.answer, prompts, sizes.answer)
            )
            about = (
                f"prompts of {sizes.short_prompt} tokens, counted in; {sizes.answer} tokens an answer; "
                f"{same} of {batch} answers are equal (16 bits: near ties fall either way)"
            )
            made.append(_rate(f"decode, {batch} at a time", "tokens/s", batch * sizes.answer, found, about))
        return made

    def picture(self) -> list[Figure]:
        """The first token about a picture nobody has seen."""
        side = self._sizes.side
        # a warm-up and the rounds, for each engine its own: neither has them in a cache
        requests = make_requests(self._rounds + 1, side=side, output_tokens=1, seed=self._seed)
        inputs = iter([self._theirs.prepare(request) for request in requests])
        fresh = iter(requests)
        found = self._turns(lambda: self._ours.first_token(next(fresh)), lambda: self._theirs.first_token(next(inputs)))
        about = "ours from the file on; transformers' inputs are ready"
        return [_duration(f"first token about a {side}x{side} picture", found, about)]

    def cache(self) -> list[Figure]:
        """A picture whose rows are on the device, or in the host's memory, beside encoding it."""
        subject = Subject(self._folder, device=self._device, dtype=self._dtype)
        picture = subject.picture(self._sizes.side, self._sizes.side, seed=self._seed + 100)
        limits = {"encoding": (0, 0), "the device": (PLENTY, 0), "the host's memory": (0, PLENTY)}
        if self._device.type == "cpu":
            del limits["the host's memory"]  # the same
        made = []
        for name, (device_bytes, host_bytes) in limits.items():
            pool = subject.pool(device_bytes=device_bytes, host_bytes=host_bytes, max_patches=1 << 20)
            with pool as one:
                take = partial(take_rows, one, picture.patches)
                found = in_turns({"ours": partial(self._finished, take)}, self._rounds)
                if name != "encoding" and one.stats().encoded != 1:
                    raise AssertionError(f"rows that were to be found in {name} were encoded again")
            title = "rows of a picture, encoded" if name == "encoding" else f"rows of a picture, found in {name}"
            made.append(_duration(title, found, f"grid {picture.grid_thw}"))
        return made

    def _turns(self, ours: Callable[[], object], theirs: Callable[[], object]) -> dict[str, Timing]:
        both = {"ours": partial(self._finished, ours), "theirs": partial(self._finished, theirs)}
        return in_turns(both, self._rounds)

    def _finished(self, run: Callable[[], object]) -> None:
        run()
        finish(self._device)

    def _largest(self, answer: Callable[[Sequence[str], int], object]) -> None:
        batch = max(self._sizes.batches)
        tokenizer = self._ours.llm.builder.tokenizer
        answer(make_prompts(tokenizer, batch, self._sizes.short_prompt, self._seed), self._sizes.answer)

    @contextmanager
    def _peak(self) -> Iterator[list[int]]:
        """Bytes that were allocated at the most meanwhile, over what was before: one, or none on a CPU."""
        peak: list[int] = []
        if self._device.type != "cuda":
            yield peak
            return
        finish(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        yield peak
        finish(self._device)
        peak.append(torch.cuda.max_memory_allocated(self._device) - before)


PARTS: dict[str, Callable[[Bench], list[Figure]]] = {
    "memory": Bench.memory,
    "tower": Bench.tower,
    "prefill": Bench.prefill,
    "decode": Bench.decode,
    "picture": Bench.picture,
    "cache": Bench.cache,
}


def _rate(name: str, unit: str, work: int, found: dict[str, Timing], about: str) -> Figure:
    """work: in each round."""
    return _figure(
        name, unit, {who: [work / second for second in one.wall] for who, one in found.items()}, found, about
    )


def _duration(name: str, found: dict[str, Timing], about: str) -> Figure:
    return _figure(name, "ms", {who: [second * 1e3 for second in one.wall] for who, one in found.items()}, found, about)


def _figure(name: str, unit: str, values: dict[str, list[float]], found: dict[str, Timing], about: str) -> Figure:
    theirs = ratio = None
    if "theirs" in values:
        theirs = Spread.of(values["theirs"])
        middle, least, most = ratios(found["theirs"].wall, found["ours"].wall)
        ratio = Spread(median=middle, least=least, most=most)
    return Figure(name=name, unit=unit, ours=Spread.of(values["ours"]), theirs=theirs, ratio=ratio, about=about)
