"""The figures of `vlmserve bench gpu`: ours and transformers', which take turns on the same device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from vision.towers.runner import pixel_values
from vlmserve.bench.gpu_sizes import Sizes, make_prompts
from vlmserve.bench.interleaved import Spread, ratios
from vlmserve.bench.questions import Question, make_questions
from vlmserve.bench.reference import Reference, ReferenceTower, check_rows
from vlmserve.bench.vision_subject import PLENTY, Subject, finish, grid_thw, take_rows, turns_on
from vlmserve.offline.llm import LLM
from vlmserve.tokenizer.sampling import SamplingOverrides
from vlmserve_common.compute.tensors import dtype_name

_MIB = 2**20


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
    """Both engines, loaded one after the other so that each one's memory can be told. Ours is without a prefix cache:
    equal work every time. Close it."""

    def __init__(self, folder: Path, sizes: Sizes, *, device: torch.device, dtype: torch.dtype, rounds: int) -> None:
        self._sizes, self._device, self._dtype, self._rounds = sizes, device, dtype, rounds
        self._folder = folder
        with self._peak() as ours_peak:
            self._llm = LLM(
                str(folder),
                device=str(device),
                dtype=dtype_name(dtype),
                disable_radix_cache=True,
                max_total_tokens=sizes.kv_tokens,
                max_pixels="checkpoint",
            )
            self._largest(self._answer)
        with self._peak() as theirs_peak:
            self._theirs = Reference(folder, device=device, dtype=dtype)
            self._largest(self._theirs.answer)
        self._peaks = [*ours_peak, *theirs_peak]

    def close(self) -> None:
        """End the engine's threads."""
        self._llm.close()

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
        media = [subject.picture(side, side, seed=number) for number in range(self._sizes.pictures)]
        patches = [patch for medium in media for patch in medium]
        pixels = pixel_values(patches, torch.device("cpu"))
        grids = [grid_thw(medium) for medium in media]
        reference = ReferenceTower(self._theirs.model, device=self._device, dtype=self._dtype)
        off = check_rows(torch.cat(subject.runner.encode(patches)), reference.encode(pixels, grids))
        found = self._turns(lambda: subject.runner.encode(patches), lambda: reference.encode(pixels, grids))
        about = f"{len(pixels)} patches of {len(media)} pictures; rows are within {off:.2g} of each other"
        return [_figure("vision tower", "patches/s", found, about, work=len(pixels))]

    def prefill(self) -> list[Figure]:
        """One long prompt and a token."""
        tokens = self._sizes.long_prompt
        prompts = make_prompts(self._theirs.tokenizer, 1, tokens)
        found = self._turns(lambda: self._answer(prompts, 1), lambda: self._theirs.answer(prompts, 1))
        return [_figure("prefill", "tokens/s", found, f"one prompt of {tokens} tokens", work=tokens)]

    def decode(self) -> list[Figure]:
        """Short prompts answered together."""
        sizes, made = self._sizes, []
        for batch in sizes.batches:
            prompts = make_prompts(self._theirs.tokenizer, batch, sizes.short_prompt)
            both = [partial(answer, prompts, sizes.answer) for answer in (self._answer, self._theirs.answer)]
            same = sum(ours == theirs for ours, theirs in zip(*(answer() for answer in both), strict=True))
            found = self._turns(*both)
            about = (
                f"prompts of {sizes.short_prompt} tokens, counted in; {sizes.answer} tokens an answer; "
                f"{same} of {batch} answers are equal (16 bits: near ties fall either way)"
            )
            made.append(_figure(f"decode, {batch} at a time", "tokens/s", found, about, work=batch * sizes.answer))
        return made

    def picture(self) -> list[Figure]:
        """The first token about a picture nobody has seen."""
        side = self._sizes.side
        # a warm-up and the rounds, for each engine its own: neither has them in a cache
        questions = make_questions(self._rounds + 1, side=side, seed=0)
        inputs = iter([self._theirs.prepare(question) for question in questions])
        fresh = iter(questions)
        found = self._turns(lambda: self._first_token(next(fresh)), lambda: self._theirs.generate(next(inputs), 1))
        about = "ours from the file on; transformers' inputs are ready"
        return [_figure(f"first token about a {side}x{side} picture", "ms", found, about)]

    def cache(self) -> list[Figure]:
        """A picture whose rows are on the device, or in the host's memory, beside encoding it."""
        subject = Subject(self._folder, device=self._device, dtype=self._dtype)
        picture = subject.picture(self._sizes.side, self._sizes.side, seed=100)
        limits = {"encoding": (0, 0), "the device": (PLENTY, 0), "the host's memory": (0, PLENTY)}
        if self._device.type == "cpu":
            del limits["the host's memory"]  # the same
        made = []
        for name, (device_bytes, host_bytes) in limits.items():
            with subject.pool(device_bytes=device_bytes, host_bytes=host_bytes, max_patches=1 << 20) as one:
                found = self._turns(partial(take_rows, one, picture))
                if name != "encoding" and one.stats().encoded != 1:
                    raise AssertionError(f"rows that were to be found in {name} were encoded again")
            title = "rows of a picture, encoded" if name == "encoding" else f"rows of a picture, found in {name}"
            made.append(_figure(title, "ms", found, f"grid {grid_thw(picture)}"))
        return made

    def _answer(self, prompts: Sequence[str], tokens: int) -> list[tuple[int, ...]]:
        return [done.token_ids for done in self._llm.generate(prompts, _greedy(tokens))]

    def _first_token(self, question: Question) -> None:
        """From a picture's file and a question."""
        self._llm.chat(question.messages(lambda picture: {"type": "image", "image": picture}), _greedy(1))

    def _turns(
        self, ours: Callable[[], object], theirs: Callable[[], object] | None = None
    ) -> dict[str, Sequence[float]]:
        """Seconds of each round, by the clock."""
        both = {"ours": ours} if theirs is None else {"ours": ours, "theirs": theirs}
        found = turns_on(self._device, self._rounds, both)
        return {name: timing.wall for name, timing in found.items()}

    def _largest(self, answer: Callable[[Sequence[str], int], object]) -> None:
        batch, tokenizer = max(self._sizes.batches), self._llm.builder.tokenizer
        answer(make_prompts(tokenizer, batch, self._sizes.short_prompt), self._sizes.answer)

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


def _figure(
    name: str, unit: str, seconds: dict[str, Sequence[float]], about: str, *, work: float | None = None
) -> Figure:
    """work: in each round, of which the rate is told; None tells milliseconds."""
    ratio = ratios(seconds["theirs"], seconds["ours"]) if "theirs" in seconds else None
    shown = {
        who: Spread.of([work / second if work else second * 1e3 for second in each]) for who, each in seconds.items()
    }
    return Figure(name=name, unit=unit, **shown, ratio=ratio, about=about)


def _greedy(tokens: int) -> SamplingOverrides:
    return SamplingOverrides(temperature=0.0, max_new_tokens=tokens, ignore_eos=True)
