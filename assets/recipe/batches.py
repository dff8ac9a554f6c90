"""Lessons side by side in one batch, made in other processes while the network learns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch
from tokenizers import Tokenizer

from assets.recipe.lessons import Hints, Lesson, Teacher
from assets.recipe.plan import Stage
from assets.recipe.sizes import MERGE


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Lessons padded to one length. ids, branches: int64 [B, L]; branch -1 is padding. taught, visual: bool [B, L].
    positions: int64 [3, B, L].

    patches: float16 [n, 1536]; grids: int64 [pictures, 3].
    hints: of all pictures, as tensors.
    """

    ids: torch.Tensor
    branches: torch.Tensor
    taught: torch.Tensor
    visual: torch.Tensor
    positions: torch.Tensor
    patches: torch.Tensor
    grids: torch.Tensor
    hints: Mapping[str, torch.Tensor]


_LENGTHS, _PATCHES = 32, 512


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def collate(lessons: list[Lesson]) -> Batch:
    """Pad to the longest, and to few different shapes: a CPU's matrix kernels are made anew for each shape they meet.

    One blank picture comes last, so that the number of patches is one of a few, too; no row has its tokens.
    """
    count, length = len(lessons), _up(max(len(lesson.ids) for lesson in lessons), _LENGTHS)
    patches = np.concatenate([lesson.patches for lesson in lessons])
    grids = [grid for lesson in lessons for grid in lesson.grids]
    blank = _up(len(patches), _PATCHES) - len(patches)
    if blank:
        patches = np.concatenate([patches, np.zeros((blank, patches.shape[1]), patches.dtype)])
        grids.append((1, MERGE, blank // MERGE))
    ids = np.zeros((count, length), np.int64)
    branches = np.full((count, length), -1)
    taught, visual = np.zeros((count, length), bool), np.zeros((count, length), bool)
    positions = np.zeros((3, count, length), np.int64)
    for row, lesson in enumerate(lessons):
        n = len(lesson.ids)
        ids[row, :n], branches[row, :n] = lesson.ids, lesson.branches
        taught[row, :n], visual[row, :n] = lesson.taught, lesson.visual
        positions[:, row, :n] = lesson.positions
    return Batch(
        ids=torch.from_numpy(ids),
        branches=torch.from_numpy(branches),
        taught=torch.from_numpy(taught),
        visual=torch.from_numpy(visual),
        positions=torch.from_numpy(positions),
        patches=torch.from_numpy(patches),
        grids=torch.tensor(grids).reshape(-1, 3),
        hints={
            field.name: torch.from_numpy(np.concatenate([getattr(lesson.hints, field.name) for lesson in lessons]))
            for field in fields(Hints)
        },
    )


def attention_mask(branches: torch.Tensor) -> torch.Tensor:
    """bool [B, 1, L, L]: a token sees those before it, of branch 0 and of its own branch. Padding sees padding."""
    length = branches.shape[1]
    before = torch.ones(length, length, dtype=torch.bool, device=branches.device).tril()
    own = branches[:, :, None] == branches[:, None, :]
    shared = (branches[:, None, :] == 0) & (branches[:, :, None] >= 0)
    return ((own | shared) & before)[:, None]


class _Batches(torch.utils.data.IterableDataset):
    """Batch k is made from (seed, k) alone, so training can go on from any step with the same data."""

    def __init__(self, tokenizer: str, stage: Stage, seed: int, first: int, end: int) -> None:
        self._settings = tokenizer, stage, seed, first, end

    def __iter__(self) -> Iterator[Batch]:
        tokenizer, stage, seed, first, end = self._settings
        words = Tokenizer.from_str(tokenizer)
        teacher = Teacher(words, stage.chances, stage.budget)
        shower = Teacher(words, stage.looks, 0) if stage.look_every else teacher
        worker = torch.utils.data.get_worker_info()
        offset, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        for k in range(first + offset, end, step):
            rng = np.random.default_rng([seed, k])
            if stage.look_every and k % stage.look_every == 0:
                yield collate([shower.lesson(rng) for _ in range(2 * stage.batch)])
            else:
                yield collate([teacher.lesson(rng) for _ in range(stage.batch)])


def batches(tokenizer: Tokenizer, stage: Stage, *, seed: int, first: int, end: int, workers: int) -> Iterator[Batch]:
    """Batches number first..end-1, in order. workers: processes that make them; 0: this one."""
    data = _Batches(tokenizer.to_str(), stage, seed, first, end)
    loader = torch.utils.data.DataLoader(
        data, batch_size=None, num_workers=workers, prefetch_factor=3 if workers else None
    )
    return iter(loader)
