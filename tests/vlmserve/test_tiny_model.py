"""The built-in random checkpoint: whole, repeatable, and what `transformers` takes for a Qwen3-VL."""

from __future__ import annotations

import filecmp
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image

from tests import hf_env  # noqa: F401
from vlmserve.checkpoints.tiny import write_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    write_tiny_model(folder)
    return folder


def test_transformers_loads_every_tensor_and_sees_the_picture(folder: Path) -> None:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.set_num_threads(1)
    model, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    processor = AutoProcessor.from_pretrained(folder)
    logits = []
    for colour in ("red", "blue"):
        picture = {"type": "image", "image": Image.new("RGB", (100, 150), colour)}
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [picture, {"type": "text", "text": "What is this?"}]},
        ]
        inputs = processor.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        shown = processor.decode(inputs["input_ids"][0])
        assert shown.startswith(
            "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<|vision_start|><|image_pad|>"
        )
        assert shown.endswith("<|vision_end|>What is this?<|im_end|>\n<|im_start|>assistant\n")
        with torch.inference_mode():
            logits.append(model(**inputs).logits[0, -1])
    assert (logits[0] - logits[1]).abs().max() > 0.5, "the answer must depend on the picture"


def test_is_small_and_the_same_each_time(folder: Path, tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    names = sorted(path.name for path in folder.iterdir())
    assert filecmp.cmpfiles(folder, tmp_path, names, shallow=False)[0] == names
    assert sum(path.stat().st_size for path in folder.iterdir()) < 10e6
    write_tiny_model(tmp_path, seed=1)
    assert filecmp.cmpfiles(folder, tmp_path, names, shallow=False)[1] == ["model.safetensors"]


def test_every_byte_has_a_token(folder: Path) -> None:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "".join(map(chr, range(256))) + "日本 🦜\r\n\t"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.encode("<|im_start|>é<|vision_start|><think>").tokens[::3] == ["<|im_start|>", "<|vision_start|>"]
    assert tokenizer.get_vocab_size() == 768


def test_needs_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from vlmserve.checkpoints.tiny import write_tiny_model;"
        "write_tiny_model(pathlib.Path(sys.argv[1])); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=True)
