"""A server that chose how large pictures may be says so, at the start and in its answers."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.default_model import copy_default_model
from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture
from tests.vlmserve.server_process import ServerProcess, media_part, serving
from vlmserve import LLM

SMALLEST = 448 * 448
TOLD = (
    f"{SMALLEST} pixels are what this machine encodes in the time set for it (--max-pixels auto, --max-pixels-auto-s)"
)
PNG = encoded(picture(640, 480), "PNG")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built-in model, which would show a picture as large as it is."""
    folder = tmp_path_factory.mktemp("model")
    copy_default_model(folder)
    for name in ("preprocessor_config.json", "video_preprocessor_config.json"):
        settings = json.loads((folder / name).read_text())
        settings["size"]["longest_edge"] = 10**7
        (folder / name).write_text(json.dumps(settings))
    return folder


@pytest.fixture(
    scope="module", params=["2", pytest.param("0", marks=pytest.mark.slow)], ids=["media processes", "threads"]
)
def server(request: Any, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """It has no time for a picture at all, whatever its speed."""
    flags = ("--max-pixels-auto-s", "1e-9", "--media-processes", request.param)
    with serving(tmp_path_factory.mktemp("run"), *flags, model=model) as server:
        yield server


def ask(server: ServerProcess, kind: str, data: bytes, **knobs: Any) -> Any:
    content = [media_part(kind, data, **knobs), {"type": "text", "text": "What?"}]
    with server.client() as client:
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": content}],  # type: ignore[list-item]
            max_tokens=2,
            extra_body={"return_mm_report": True},
        ).model_dump()


def test_pictures_that_are_scaled_down_are_told(server: ServerProcess) -> None:
    server.await_log(rf"scaled down to at most {SMALLEST} pixels \(\d+x\d+ of 4:3\).*--max-pixels checkpoint gives")
    answer = ask(server, "image", PNG)
    (warning,) = answer["warnings"]
    assert f"the picture of 640x480 pixels was scaled down to 512x384: {TOLD}" in warning
    assert "--max-pixels checkpoint gives the full size" in warning
    (medium,) = answer["mm_report"]["media"]
    assert medium["final_size"] == {"width": 512, "height": 384}
    asked = {"knob": "max_pixels", "asked": 640 * 480, "used": 512 * 384, "limit": SMALLEST}
    assert medium["clamps"] == [asked | {"setting": "setting --max-pixels auto"}]
    assert ask(server, "image", PNG, max_pixels=300 * 300).get("warnings") is None, "so it was asked for"
    assert ask(server, "image", encoded(picture(320, 320), "PNG")).get("warnings") is None, "there is room for it"
    (warning,) = ask(server, "image", PNG, max_pixels=10**6)["warnings"]
    assert f"max_pixels 1000000 was changed to {SMALLEST}" in warning


def test_frames_too(server: ServerProcess) -> None:
    answer = ask(server, "video", make_clip(4, width=640, height=480, fps=2))
    (warning,) = answer["warnings"]
    assert "each frame of 640x480 pixels was scaled down to 512x384" in warning
    assert ask(server, "video", make_clip(4, width=320, height=320, fps=2)).get("warnings") is None


def test_llm(model: Path) -> None:
    with LLM(str(model), num_threads=1, max_total_tokens=4096, max_pixels_auto_s=1e-9) as llm:
        (warning,) = llm.chat("What?", images=PNG, max_tokens=1).warnings
        assert "640x480 pixels was scaled down to 512x384" in warning
    for limit, width in (("checkpoint", 640), (SMALLEST, 512)):
        with LLM(str(model), num_threads=1, max_total_tokens=4096, max_pixels=limit) as llm:
            answer = llm.chat("What?", images=PNG, max_tokens=1)
            assert answer.mm_report["media"][0]["final_size"]["width"] == width
            assert not answer.warnings, "nobody else chose"
