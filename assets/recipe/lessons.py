"""A lesson: one prompt with pictures, and many dialogues about them, in one row of tokens.

The pictures are paid for once: dialogues that begin after the same pictures are branches that do not see each other
(`branches`), each at the positions it would have alone. So one row teaches what as many single prompts would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np
from PIL import Image, ImageChops, ImageDraw
from tokenizers import Tokenizer

from assets.recipe.chatml import added_ids
from assets.recipe.clips import MOVES, Clip, make_clip
from assets.recipe.paint import font, paint, strange, wear
from assets.recipe.sizes import MAX_PIXELS, MERGE, MIN_PIXELS, PATCH, TEMPORAL_PATCH, VIDEO_MAX_PIXELS, VIDEO_MIN_PIXELS
from assets.recipe.tokenizer import EVERYDAY
from assets.recipe.wording import Dialogue, about_clip, about_strange, album, dialogues, talk
from assets.recipe.world import COLOURS, SHAPES, Rng, Scene, make_scene, pick_size
from assets.recipe.writing import LONGEST, make_page, make_print_scene
from processors.mrope import MediaSpan, mrope_positions
from processors.normalize import normalize
from processors.resize import PatchConfig, frames_to_patches, resize_frames, smart_resize

PATCHES = PatchConfig(
    patch_size=PATCH, merge_size=MERGE, temporal_patch_size=TEMPORAL_PATCH, mean=(0.5,) * 3, std=(0.5,) * 3
)
CHARACTERS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
MOTIONS = tuple(MOVES)
OUTLINE = 4
"""Cells a side of a patch for which `Hints.outline` has the covered share."""

_SYSTEM = ("You are a helpful assistant.", "You are a helpful assistant", "Answer briefly.", "You describe pictures.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What each token of a picture shows, to teach the vision tower directly.

    things: int64 [n], 0 for nothing, else 1 + 8 * shape + colour of the object over the token's middle.
    offsets: float32 [n, 4], from the token's middle to the object's, and its size, all in tokens.
    places: float32 [n, 6], the object's middle and its box in the picture, (x, y, x0, y0, x1, y1), 0..1.
    motion: int64 [n], between the two frames: 0 for none, else 1 + index in MOTIONS of the object over the token.
    characters: int64 [n, 4], per patch: 0 for none, else 1 + index of the character printed over its middle.
    turns: int64 [n, 4], which character of its text that is, from 1; 0 for none.
    outline: uint8 [n, 64], for each patch 4x4 shares of it, 0..255, that are covered by objects or print.
    """

    things: np.ndarray
    offsets: np.ndarray
    places: np.ndarray
    motion: np.ndarray
    characters: np.ndarray
    turns: np.ndarray
    outline: np.ndarray


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """A lesson of L tokens. ids, branches: int64 [L]; all tokens see branch 0, and another branch is seen by its own
    tokens.

    taught: bool [L], tokens to predict. positions: int64 [3, L]. visual: bool [L], pad tokens of pictures.
    patches: float16 [n, 1536] of all pictures in order; grids: (t, h, w) of each.
    """

    ids: np.ndarray
    branches: np.ndarray
    taught: np.ndarray
    positions: np.ndarray
    visual: np.ndarray
    patches: np.ndarray
    grids: tuple[tuple[int, int, int], ...]
    hints: Hints


@dataclass(frozen=True, kw_only=True, slots=True)
class Seen:
    """A picture, or two frames of a clip, as the vision tower gets it. seconds: of the frames, None for a picture."""

    patches: np.ndarray
    grid: tuple[int, int, int]
    hints: Hints
    seconds: float | None = None

    @property
    def tokens(self) -> int:
        """Pad tokens it takes."""
        return self.grid[0] * self.grid[1] * self.grid[2] // MERGE**2


def see(picture: Image.Image, scene: Scene | None, min_pixels: int = MIN_PIXELS, max_pixels: int = MAX_PIXELS) -> Seen:
    """Resize and cut into patches, as the served model's processor does."""
    factor = PATCHES.factor
    height, width = smart_resize(
        picture.height, picture.width, factor=factor, min_pixels=min_pixels, max_pixels=max_pixels
    )
    pixels = resize_frames(np.array(picture)[None], height, width, "bicubic")
    patches, grid = _cut(pixels)
    return Seen(patches=patches, grid=grid, hints=hints(scene, grid))


def watch(clip: Clip, rng: Rng) -> list[Seen]:
    """A clip's temporal patches, each of two frames."""
    factor, total = PATCHES.factor, len(clip.frames)
    first = clip.frames[0]
    height, width = smart_resize(
        first.height,
        first.width,
        factor=factor,
        min_pixels=VIDEO_MIN_PIXELS // total,
        max_pixels=VIDEO_MAX_PIXELS // total,
    )
    frames = [paint(scene) for scene in clip.frames]
    if rng.random() < 0.3:
        grain = int(rng.integers(2**31))  # the same wear for all
        frames = [wear(frame, np.random.default_rng(grain)) for frame in frames]
    pixels = resize_frames(np.stack([np.asarray(frame) for frame in frames]), height, width, "bicubic")
    seen = []
    motion = clip.event if clip.event in MOTIONS else None
    for k, seconds in zip(range(0, total, TEMPORAL_PATCH), clip.label_times, strict=True):
        patches, grid = _cut(pixels[k : k + TEMPORAL_PATCH])
        told = hints(clip.frames[k], grid, motion)
        seen.append(Seen(patches=patches, grid=grid, hints=told, seconds=seconds))
    return seen


def _cut(frames: np.ndarray) -> tuple[np.ndarray, tuple[int, int, int]]:
    """One frame or a temporal patch's, uint8 [T, H, W, 3] -> float16 patches, and their grid."""
    levels, grid = frames_to_patches(frames, PATCHES)
    values = normalize(levels, PATCHES.normalization(len(frames)))
    return values.numpy().astype(np.float16), grid


def hints(scene: Scene | None, grid: tuple[int, int, int], motion: str | None = None) -> Hints:
    """Hints of one picture; scene None: the picture shows nothing known. motion: of the scene's first object."""
    rows, columns = grid[1] // MERGE, grid[2] // MERGE
    things = np.zeros((rows, columns), np.int64)
    offsets = np.zeros((rows, columns, 4), np.float32)
    places = np.zeros((rows, columns, 6), np.float32)
    motions = np.zeros((rows, columns), np.int64)
    characters = np.zeros((2, rows, MERGE, columns, MERGE), np.int64)
    if scene is not None:
        y, x = np.mgrid[:rows, :columns] + 0.5
        sx, sy = columns / scene.width, rows / scene.height
        for k, thing in enumerate(scene.things):
            x0, y0, x1, y1 = thing.box[0] * sx, thing.box[1] * sy, thing.box[2] * sx, thing.box[3] * sy
            cx, cy = (x0 + x1) / 2, (y0 + y1) / 2
            over = (x > x0) & (x < x1) & (y > y0) & (y < y1)
            over[min(rows - 1, int(cy)), min(columns - 1, int(cx))] = True
            things[over] = 1 + len(COLOURS) * SHAPES.index(thing.shape) + COLOURS.index(thing.colour)
            offsets[over] = np.stack([cx - x, cy - y, np.full_like(x, x1 - x0), np.full_like(y, y1 - y0)], -1)[over]
            places[over] = np.asarray((*thing.centre, *thing.box)) / ((scene.width, scene.height) * 3)
            if k == 0 and motion is not None:
                motions[over] = 1 + MOTIONS.index(motion)
        _mark_characters(scene, characters)
    return Hints(
        things=things.reshape(-1),
        offsets=offsets.reshape(-1, 4),
        places=places.reshape(-1, 6),
        motion=motions.reshape(-1),
        characters=characters[0].transpose(0, 2, 1, 3).reshape(-1, MERGE**2),
        turns=characters[1].transpose(0, 2, 1, 3).reshape(-1, MERGE**2),
        outline=_outline(scene, rows, columns),
    )


def _outline(scene: Scene | None, rows: int, columns: int) -> np.ndarray:
    cells, finer = MERGE * OUTLINE, 2
    size = columns * cells * finer, rows * cells * finer
    if scene is None or not rows:
        return np.zeros((rows * columns, cells**2), np.uint8)
    covered = Image.new("L", size)
    pen = ImageDraw.Draw(covered)
    scale = np.asarray(size) / (scene.width, scene.height)
    for thing in scene.things:
        pen.polygon([(x * scale[0], y * scale[1]) for x, y in thing.points], fill=255)
    if scene.prints:
        large = Image.new("L", (scene.width, scene.height))
        for text in scene.prints:
            face = font(text.face, text.size)
            ImageDraw.Draw(large).text(text.anchor, text.text, fill=255, font=face, anchor="mm")
        covered = ImageChops.lighter(covered, large.resize(size, Image.Resampling.BOX))
    pixels = np.asarray(covered.reduce(finer))
    windows = pixels.reshape(rows, MERGE, OUTLINE, columns, MERGE, OUTLINE).transpose(0, 3, 1, 4, 2, 5)
    return windows.reshape(rows * columns, cells**2)


def _mark_characters(scene: Scene, characters: np.ndarray) -> None:
    """characters: [2, rows, 2, columns, 2], what and which of its text, written in place."""
    what, which = characters.reshape(2, characters.shape[1] * MERGE, -1)  # views: patches by row and column
    y, x = np.mgrid[: what.shape[0], : what.shape[1]] + 0.5
    x, y = x * scene.width / what.shape[1], y * scene.height / what.shape[0]
    for text in scene.prints:
        face = font(text.face, text.size)
        start = text.anchor[0] - face.getlength(text.text) / 2
        _, top, _, bottom = face.getbbox(text.text, anchor="mm")
        for k, character in enumerate(text.text):
            if character in CHARACTERS:
                left, right = (start + face.getlength(text.text[:n]) for n in (k, k + 1))
                over = (x > left) & (x < right) & (y > text.anchor[1] + top - 2) & (y < text.anchor[1] + bottom + 2)
                what[over] = 1 + CHARACTERS.index(character)
                which[over] = min(k + 1, LONGEST)


class Teacher:
    """Makes lessons. chances: how often each kind comes. budget: most tokens in a row; 0: pictures, no questions."""

    def __init__(self, tokenizer: Tokenizer, chances: Mapping[str, float], budget: int) -> None:
        self._tokenizer = tokenizer
        self._kinds = list(chances)
        self._chances = np.asarray(list(chances.values())) / sum(chances.values())
        self._budget = budget
        ids = added_ids(tokenizer)
        self._start, self._end = ids["<|im_start|>"], ids["<|im_end|>"]
        self._vision_start, self._vision_end = ids["<|vision_start|>"], ids["<|vision_end|>"]
        self._image, self._video = ids["<|image_pad|>"], ids["<|video_pad|>"]

    def lesson(self, rng: Rng) -> Lesson:
        """One lesson of a random kind."""
        kind = self._kinds[int(rng.choice(len(self._kinds), p=self._chances))]
        pictures: list[Seen] = []
        prints: list[str] = []
        if kind in ("scene", "print", "page"):
            if kind == "scene":
                count = int(rng.choice([0, 1, 2, 3, 4, 5, 6], p=[0.02, 0.2, 0.23, 0.25, 0.1, 0.1, 0.1]))
                scene = make_scene(rng, count) if self._budget else make_scene(rng, min(count, 4), smallest=0.2)
            else:
                scene = make_print_scene(rng) if kind == "print" else make_page(rng)
                prints = [p.text for p in scene.prints]
            pictures = [see(wear(paint(scene), rng), scene)]
            talks = dialogues(scene, rng, 16 if self._budget else 0)
        elif kind == "album":
            count = 2 if rng.random() < 0.6 else 3
            scenes = [make_scene(rng, int(rng.choice([1, 2, 3], p=[0.45, 0.35, 0.2]))) for _ in range(count)]
            pictures = [see(wear(paint(scene), rng), scene) for scene in scenes]
            talks = [d for _ in range(32) for d in [album(scenes, rng)] if d][:16]
        elif kind == "clip":
            clip = make_clip(rng)
            pictures = watch(clip, rng)
            talks = [d for _ in range(24) for d in [about_clip(clip, rng)] if d]
        elif kind == "strange":
            name, picture = strange(rng, *pick_size(rng))
            pictures = [see(wear(picture, rng), None)]
            talks = [about_strange(name, rng) for _ in range(12)]
        else:
            talks = [talk(rng, EVERYDAY) for _ in range(14)]
        roll = rng.random()
        if not self._budget:
            return self._row(rng, pictures, [], prints, question_first=False)
        if pictures and roll < 0.1 and talks:
            return self._row(rng, pictures, talks[:1], prints, question_first=True)
        if roll < 0.2:  # one long conversation, nothing hidden from what follows
            talks = [[turn for dialogue in talks[:5] for turn in dialogue]]
        return self._row(rng, pictures, talks, prints, question_first=False)

    def _row(
        self, rng: Rng, pictures: Sequence[Seen], talks: Sequence[Dialogue], prints: Sequence[str], question_first: bool
    ) -> Lesson:
        ids: list[int] = []
        taught: list[bool] = []
        spans: list[MediaSpan] = []

        def add(tokens: Sequence[int], teach: bool = False) -> None:
            ids.extend(tokens)
            taught.extend([teach] * len(tokens))

        if rng.random() < 0.15:
            system = _SYSTEM[int(rng.integers(len(_SYSTEM)))]
            add([self._start, *self._encode("system\n" + system), self._end, *self._encode("\n")])
        add([self._start, *self._encode("user\n")])
        if question_first:
            add(self._encode(talks[0][0][0]))
        for seen in pictures:
            if seen.seconds is not None:
                add(self._encode(f"<{seen.seconds:.1f} seconds>"))
            add([self._vision_start])
            spans.append(MediaSpan(start=len(ids), grid=(1, seen.grid[1] // MERGE, seen.grid[2] // MERGE)))
            pad = self._image if seen.seconds is None else self._video
            add([pad] * seen.tokens + [self._vision_end])
        shared = len(ids)
        positions, delta = mrope_positions(shared, spans)
        rows = [positions]
        branches = [0] * shared
        for number, dialogue in enumerate(talks, 1):
            first, before = len(ids), (list(ids), list(taught))
            for turn, (question, answer) in enumerate(dialogue):
                if turn > 0:
                    if len(ids) - first > 90:
                        break
                    add([*self._encode("\n"), self._start, *self._encode("user\n")])
                if turn > 0 or not question_first:
                    add(self._encode(question))
                add([self._end, *self._encode("\n"), self._start, *self._encode("assistant\n")])
                add([*self._encode_answer(answer, prints), self._end], teach=True)
            if number > 1 and len(ids) > self._budget:
                ids, taught = before
                continue
            branches += [number] * (len(ids) - first)
            rows.append(np.broadcast_to(np.arange(len(ids) - first) + shared + delta, (3, len(ids) - first)))
        visual = np.zeros(len(ids), bool)
        for span in spans:
            visual[span.start : span.end] = True
        none = hints(None, (1, 0, 0))
        parts = [seen.hints for seen in pictures] or [none]
        return Lesson(
            ids=np.asarray(ids),
            branches=np.asarray(branches),
            taught=np.asarray(taught),
            positions=np.concatenate(rows, 1),
            visual=visual,
            patches=np.concatenate([seen.patches for seen in pictures])
            if pictures
            else np.zeros((0, 3 * TEMPORAL_PATCH * PATCH**2), np.float16),
            grids=tuple(seen.grid for seen in pictures),
            hints=Hints(**{f.name: np.concatenate([getattr(h, f.name) for h in parts]) for f in fields(Hints)}),
        )

    def _encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def _encode_answer(self, answer: str, prints: Sequence[str]) -> list[int]:
        """Printed words are spelled: one token a character, as they are read."""
        for text in prints:
            before, found, after = answer.partition(text)
            if found:
                spelled = [token for character in text for token in self._encode(character)]
                return self._encode_answer(before, prints) + spelled + self._encode_answer(after, prints)
        return self._encode(answer) if answer else []
