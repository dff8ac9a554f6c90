"""Media for warmups, and the command run in this process."""

from __future__ import annotations

import base64
import io
import json
from pathlib import Path

from tests.processors.clips import make_clip
from tests.vlmserve.reference import picture
from vlmserve import cli


def png(seed: int, width: int = 96, height: int = 64) -> bytes:
    file = io.BytesIO()
    picture(seed, width, height).save(file, "PNG")
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def fill(folder: Path) -> Path:
    """Two pictures, one of them without a telling name and in a folder below, and a clip."""
    (folder / "below").mkdir(parents=True)
    (folder / "a.png").write_bytes(png(1))
    (folder / "below" / "b").write_bytes(png(2, 77, 131))
    (folder / "clip.mp4").write_bytes(make_clip(30))
    return folder


def fill_badly(folder: Path) -> Path:
    """The same, with files that are no media, or broken."""
    fill(folder)
    (folder / "broken.png").write_bytes(png(3)[:200])
    (folder / "notes.txt").write_text("no list, but notes")
    (folder / ".hidden.png").write_bytes(b"no picture")
    return folder


def entries(cache: Path, suffix: str = ".safetensors") -> set[str]:
    return {path.stem for path in cache.rglob(f"*{suffix}")}


def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def warmup(capsys, *words: object, status: int = 0) -> dict:
    """Run the command; its summary."""
    capsys.readouterr()
    assert cli.main(["warmup", *map(str, words), "--json", "--num-threads", "1"]) == status, capsys.readouterr()
    return json.loads(capsys.readouterr().out)


def complaint(capsys, status: int, *words: object) -> str:
    """Run the command, which fails; what it says on stderr."""
    capsys.readouterr()
    assert cli.main(["warmup", *map(str, words), "--num-threads", "1"]) == status
    return capsys.readouterr().err
