"""From a scene to a picture, and pictures of nothing we know."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFilter, ImageFont

from assets.recipe.world import Print, Rng, Scene, any_colour

_LARGE = 420  # pixels: above, the edge's smoothing comes from the resizing that follows


def paint(scene: Scene) -> Image.Image:
    """The scene as RGB, its objects with smooth edges."""
    scale = 1 if max(scene.width, scene.height) > _LARGE else 3 if max(scene.width, scene.height) < 160 else 2
    size = scene.width, scene.height
    ground = _background(replace(scene, things=(), prints=())).copy()
    if scene.things:
        large = ground.resize((size[0] * scale, size[1] * scale), Image.Resampling.NEAREST) if scale > 1 else ground
        pen = ImageDraw.Draw(large)
        for thing in scene.things:
            pen.polygon([(x * scale, y * scale) for x, y in thing.points], fill=thing.rgb)
        ground = large.reduce(scale) if scale > 1 else large
    for text in scene.prints:
        ImageDraw.Draw(ground).text(text.anchor, text.text, fill=text.rgb, font=font(text.face, text.size), anchor="mm")
    return ground


@lru_cache(maxsize=1)
def _background(scene: Scene) -> Image.Image:
    """Kept for the next frame of a clip."""
    rng = np.random.default_rng(scene.seed)
    width, height = scene.width, scene.height
    if scene.texture == "plain":
        return Image.new("RGB", (width, height), scene.background)
    amplitude = 4 + 22 * scene.strength
    if scene.texture == "grain":
        field = rng.normal(0, 0.5, (height, width, 1 if rng.random() < 0.5 else 3))
    elif scene.texture == "clouds":
        cells = int(rng.integers(3, 14))
        small = rng.uniform(-1, 1, (cells, cells)).astype(np.float32)
        field = np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))[..., None]
    elif scene.texture == "stripes":
        angle, period = rng.uniform(0, math.pi), rng.uniform(0.04, 0.3) * max(width, height)
        y, x = np.mgrid[:height, :width]
        field = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period)[..., None]
    else:
        y, x = np.mgrid[:height, :width].astype(np.float32)
        y, x = y / height - 0.5, x / width - 0.5
        angle = rng.uniform(0, 2 * math.pi)
        ramp = x * math.cos(angle) + y * math.sin(angle) if scene.texture == "gradient" else 0.5 - 2 * (x * x + y * y)
        field = 1.6 * ramp[..., None]
    pixels = np.asarray(scene.background, np.float32) + amplitude * field.astype(np.float32)
    return Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def wear(picture: Image.Image, rng: Rng) -> Image.Image:
    """What happens to pictures on their way: JPEG, slight blur, slight noise. Most stay as they are."""
    if rng.random() < 0.06:
        picture = picture.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.3, 0.9))))
    if rng.random() < 0.06:
        noisy = np.asarray(picture, np.float32) + rng.normal(0, rng.uniform(2, 7), (*picture.size[::-1], 1))
        picture = Image.fromarray(np.clip(noisy, 0, 255).astype(np.uint8))
    if rng.random() < 0.3:
        buffer = io.BytesIO()
        picture.save(buffer, "JPEG", quality=int(rng.integers(55, 96)), subsampling=int(rng.choice([0, 2])))
        picture = Image.open(buffer).convert("RGB")
    return picture


def strange(rng: Rng, width: int, height: int) -> tuple[str, Image.Image]:
    """A picture outside the world of shapes, and its kind: "noise", "stripes", "blur" or "photo"."""
    kind = str(rng.choice(["noise", "stripes", "blur", "photo", "photo", "photo"]))
    if kind == "noise":
        cell = int(rng.integers(1, 5))
        channels = 3 if rng.random() < 0.7 else 1
        small = rng.integers(0, 256, (math.ceil(height / cell), math.ceil(width / cell), channels)).astype(np.uint8)
        pixels = np.broadcast_to(np.repeat(np.repeat(small, cell, 0), cell, 1)[:height, :width], (height, width, 3))
    elif kind == "stripes":
        y, x = np.mgrid[:height, :width]
        angle, period = rng.uniform(0, math.pi), rng.uniform(0.03, 0.2) * max(width, height)
        wave = np.sin((x * math.cos(angle) + y * math.sin(angle)) * 2 * math.pi / period)
        if rng.random() < 0.4:
            wave = wave * np.sin((y * math.cos(angle) - x * math.sin(angle)) * 2 * math.pi / period)
        weight = np.clip(wave * rng.uniform(1, 8), -1, 1)[..., None] / 2 + 0.5
        pixels = np.asarray(any_colour(rng)) * weight + np.asarray(any_colour(rng)) * (1 - weight)
    else:
        pixels = _octaves(
            rng, width, height, detail=rng.uniform(0.35, 0.5) if kind == "blur" else rng.uniform(0.6, 0.9)
        )
        if kind == "photo":
            pixels = _clutter(pixels, rng)
    return kind, Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))


def _octaves(rng: Rng, width: int, height: int, detail: float) -> np.ndarray:
    """Noise of all sizes in related colours, [height, width, 3]; detail: how much of each finer size there is."""
    total = np.zeros((height, width), np.float32)
    weight = 1.0
    cells = 2
    while cells < max(width, height) / 2:
        small = rng.normal(0, weight, (cells, cells)).astype(np.float32)
        total += np.asarray(Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC))
        weight *= detail
        cells *= 2
    spread = (total - total.min()) / max(float(np.ptp(total)), 1e-6)
    stops = np.asarray([any_colour(rng) for _ in range(int(rng.integers(2, 5)))], np.float32)
    return np.stack([np.interp(spread, np.linspace(0, 1, len(stops)), stops[:, c]) for c in range(3)], -1)


def _clutter(pixels: np.ndarray, rng: Rng) -> np.ndarray:
    """Many irregular, shaded patches on top of each other, as in a photograph."""
    height, width = pixels.shape[:2]
    picture = Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8))
    for _ in range(int(rng.integers(0, 14))):
        mask = Image.new("L", picture.size, 0)
        centre = rng.uniform(0, 1, 2) * (width, height)
        corners = int(rng.integers(5, 14))
        angles = np.sort(rng.uniform(0, 2 * math.pi, corners))
        radii = rng.uniform(0.03, 0.4) * min(width, height) * rng.uniform(0.4, 1.3, corners)
        ImageDraw.Draw(mask).polygon(
            [(centre[0] + r * math.cos(a), centre[1] + r * math.sin(a)) for r, a in zip(radii, angles, strict=True)],
            fill=int(rng.integers(120, 256)),
        )
        mask = mask.filter(ImageFilter.GaussianBlur(float(rng.uniform(0.2, 4))))
        patch = _octaves(rng, width, height, detail=rng.uniform(0.5, 0.9)) if rng.random() < 0.4 else None
        layer = (
            Image.fromarray(patch.astype(np.uint8))
            if patch is not None
            else Image.new("RGB", picture.size, any_colour(rng))
        )
        picture.paste(layer, mask=mask)
    return np.asarray(picture, np.float32)


@lru_cache(maxsize=4096)
def font(face: int, size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Font number `face` (counted round the installed ones) at `size` pixels."""
    faces = _faces()
    path = faces[face % len(faces)]
    return ImageFont.load_default(size) if path is None else ImageFont.truetype(str(path), size)


@lru_cache(maxsize=1)
def _faces() -> tuple[Path | None, ...]:
    """Pillow's own font, and those that matplotlib brings when it is installed."""
    try:
        import matplotlib
    except ImportError:
        return (None,)
    folder = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    return (None, *sorted(p for p in folder.glob("*.ttf") if p.stem.startswith("DejaVu") and "Display" not in p.stem))


def print_box(text: Print) -> tuple[float, float, float, float]:
    """(x0, y0, x1, y1) of printed text, in pixels."""
    x0, y0, x1, y1 = font(text.face, text.size).getbbox(text.text, anchor="mm")
    return text.anchor[0] + x0, text.anchor[1] + y0, text.anchor[0] + x1, text.anchor[1] + y1
