"""What a file is called, by its first bytes."""

from __future__ import annotations

import io

import pytest
from PIL import Image

from processors.formats import HEAD_BYTES, mime_type
from tests.processors.clips import make_clip


@pytest.mark.parametrize("name", ["png", "jpeg", "webp", "gif", "bmp", "tiff"])
def test_pictures(name: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, name)
    assert mime_type(out.getvalue()[:HEAD_BYTES]) == f"image/{name}"


@pytest.mark.parametrize(
    ("container", "name"),
    [("mp4", "mp4"), ("mov", "quicktime"), ("matroska", "x-matroska"), ("webm", "webm")],
)
def test_videos(container: str, name: str) -> None:
    codec = {"codec": "libvpx-vp9"} if container == "webm" else {}
    assert mime_type(make_clip(2, container=container, **codec)[:HEAD_BYTES]) == f"video/{name}"


@pytest.mark.parametrize("head", [b"", b"plain text", b"%PDF-1.7", b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"])
def test_others(head: bytes) -> None:
    assert mime_type(head) == "application/octet-stream"
