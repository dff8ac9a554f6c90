"""From a picture to boxes in its own pixels, through the real server and the official client, as each family counts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer

from tests.processors.helpers import encoded, picture
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.server_process import SAMPLES, ServerProcess, media_part, serving
from vlmserve.commands.client.boxes import Box, parse_boxes

# What a Qwen2.5-VL would say of a picture that is resized to 252x168.
ABSOLUTE = '```json\n[{"bbox_2d": [63, 42, 126, 84], "label": "star"}]\n```'


@pytest.fixture
def qwen2_5(tmp_path: Path) -> Path:
    """A tiny Qwen2.5-VL with one token more, whose text is a whole answer."""
    folder = make_checkpoint("qwen2_5_vl", tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens([AddedToken(ABSOLUTE, normalized=False)])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def answer_token(folder: Path) -> int:
    token = Tokenizer.from_file(str(folder / "tokenizer.json")).token_to_id(ABSOLUTE)
    assert token is not None
    return token


def ask(client: openai.OpenAI, data: bytes, question: str, knobs: Any = None, **options: Any) -> tuple[Any, Any]:
    """The first choice, and what is reported of the picture."""
    content = [media_part("image", data, **(knobs or {})), {"type": "text", "text": question}]
    answer = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": content}],
        temperature=0,
        extra_body={"return_mm_report": True},
        **options,
    )
    (medium,) = answer.mm_report["media"]
    return answer.choices[0], medium


def sideways() -> bytes:
    """A JPEG of 200x300 pixels that is shown as 300x200."""
    image = picture(200, 300)
    exif = Image.Exif()
    exif[0x0112] = 6
    return encoded(image, "JPEG", exif=exif.tobytes())


def test_absolute_coordinates(qwen2_5: Path, tmp_path: Path) -> None:
    """Of the resized picture, of which the knobs decide; the source is upright."""
    bias = {str(answer_token(qwen2_5)): 100}
    with serving(tmp_path / "run", model=qwen2_5) as server, server.client() as client:

        def boxes(**knobs: Any) -> tuple[Box, ...]:
            choice, medium = ask(client, sideways(), "Where is the star?", knobs, max_tokens=1, logit_bias=bias)
            assert medium["source_size"] == {"width": 300, "height": 200}
            assert medium["coordinates"] == "absolute"
            assert choice.message.content == ABSOLUTE
            marks = parse_boxes(choice.message.content)
            assert not marks.problems
            return marks.to_source(medium).boxes

        (box,) = boxes()
        # the tower saw 252x168
        assert (box.x1, box.y1, box.x2, box.y2) == pytest.approx((75, 50, 150, 100))
        assert box.label == "star"
        (box,) = boxes(resized_height=112, resized_width=168)
        assert (box.x1, box.y1, box.x2, box.y2) == pytest.approx((112.5, 75, 225, 150))


def overlap(box: Box, truth: tuple[float, float, float, float]) -> float:
    """Intersection over union."""
    width = max(0.0, min(box.x2, truth[2]) - max(box.x1, truth[0]))
    height = max(0.0, min(box.y2, truth[3]) - max(box.y1, truth[1]))
    own, others = (box.x2 - box.x1) * (box.y2 - box.y1), (truth[2] - truth[0]) * (truth[3] - truth[1])
    return width * height / (own + others - width * height)


@pytest.mark.parametrize(
    ("name", "question", "truth"),
    [
        ("shapes.png", "Locate the red circle, output its bbox coordinates using JSON format.", (36, 40, 156, 160)),
        ("wide.jpg", "Give the bounding box of the triangle in JSON.", (700, 50, 900, 250)),
        ("small-star.png", "Where is the star? Output a bounding box in JSON.", (25, 7, 59, 41)),
    ],
)
def test_thousandths(
    shared_server: ServerProcess, name: str, question: str, truth: tuple[float, float, float, float]
) -> None:
    """The default model's own answers, about places it was told nothing of. It is small, and no surveyor."""
    data = (SAMPLES / name).read_bytes()
    with shared_server.client() as client:
        choice, medium = ask(client, data, question, max_tokens=64)
        cut, _ = ask(client, data, question, max_tokens=8)
    assert medium["coordinates"] == "0-1000"
    with Image.open(io.BytesIO(data)) as image:
        assert medium["source_size"] == {"width": image.width, "height": image.height}
    marks = parse_boxes(choice.message.content)
    assert not marks.problems
    (box,) = marks.to_source(medium).boxes
    assert overlap(box, truth) > 0.35, box
    assert cut.finish_reason == "length"
    assert parse_boxes(cut.message.content).problems
