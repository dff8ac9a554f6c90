"""The reference to beat: a loop of `transformers` generate calls over the same requests, one at a time.

Runs in a process of its own (`python -m vlmserve.bench.baseline`), so that its memory is its own. Decoding and
resizing pictures is not counted against it: its inputs are ready before the clock starts.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vlmserve.bench.load import BenchRequest, Timing, make_requests
from vlmserve.bench.processes import own_peak_memory
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable


def run_baseline(model_path: Path, plan: dict[str, int]) -> dict[str, Any]:
    """plan: count, side, output_tokens, seed of `make_requests`, and num_threads. Returns timings, seconds, bytes."""
    import torch

    make_torchvision_importable()
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(plan.pop("num_threads"))
    requests = make_requests(plan["count"], side=plan["side"], output_tokens=plan["output_tokens"], seed=plan["seed"])
    prepare = Preparation(model_path)
    inputs = [prepare(request) for request in requests]
    model: Any = AutoModelForImageTextToText.from_pretrained(model_path, dtype="auto").eval()
    timings = []
    started = time.perf_counter()
    with torch.inference_mode():
        for request, prepared in zip(requests, inputs, strict=True):
            timings.append(_generate(model, prepared, request, prepare))
    wall = time.perf_counter() - started
    return {
        "timings": [[t.ttft_s, t.total_s, t.tokens, t.text] for t in timings],
        "wall_s": wall,
        "peak_bytes": own_peak_memory(),
    }


class Preparation:
    """Requests to model inputs, by our own template and processor (equal to the reference's, as the tests show)."""

    def __init__(self, folder: Path) -> None:
        from processors.families.registry import make_processor
        from vlmserve.tokenizer.chat_template import load_chat_template
        from vlmserve.tokenizer.text_tokenizer import load_text_tokenizer, read_json

        self.tokenizer = load_text_tokenizer(folder)
        self._template = load_chat_template(folder)
        self._processor = make_processor(folder, read_json(folder / "config.json"))

    def __call__(self, request: BenchRequest) -> dict[str, Any]:
        import io

        import torch
        from PIL import Image

        from vision.towers.runner import pixel_values
        from vision.towers.temporal_patch import temporal_patches

        text = self._template.render(request.messages({"type": "image"}))
        image = Image.open(io.BytesIO(request.picture))
        ids, media = self._processor.process(self.tokenizer.encode(text), [image])
        assert media is not None
        item = media.items[0]
        kinds = torch.zeros(1, len(ids), dtype=torch.long)
        for start, end in item.offsets:
            kinds[0, start:end] = 1
        return {
            "input_ids": torch.from_numpy(ids)[None],
            "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
            "pixel_values": pixel_values(temporal_patches(item), torch.device("cpu")),
            "image_grid_thw": torch.tensor([item.grid_thw]),
            "mm_token_type_ids": kinds,
        }


def _generate(model: Any, inputs: dict[str, Any], request: BenchRequest, prepare: Preparation) -> Timing:
    from transformers.generation.streamers import BaseStreamer

    class FirstToken(BaseStreamer):
        calls = 0
        at = 0.0

        def put(self, value: Any) -> None:
            self.calls += 1
            if self.calls == 2:  # the first call brings the prompt
                self.at = time.perf_counter()

        def end(self) -> None:
            pass

    streamer = FirstToken()
    started = time.perf_counter()
    count = request.output_tokens
    out = model.generate(
        **inputs,
        max_new_tokens=count,
        min_new_tokens=count,
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        streamer=streamer,
    )
    ended = time.perf_counter()
    ids = out[0, inputs["input_ids"].shape[1] :].tolist()
    text = prepare.tokenizer.decode(ids)
    return Timing(ttft_s=streamer.at - started, total_s=ended - started, tokens=len(ids), text=text)


if __name__ == "__main__":
    print(json.dumps(run_baseline(Path(sys.argv[1]), json.loads(sys.argv[2]))))
