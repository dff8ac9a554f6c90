"""`vlmserve bench audio`: from a sound file to embeddings, beside transformers' feature extractor and audio tower.

Both sides have the same random weights, of the published sizes, and take turns.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import wave
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from processors.families.base import data_items
from processors.families.registry import make_processor
from vision.towers.audio import AudioTower
from vision.towers.loading import EARS
from vision.towers.pieces import UNLIMITED, finish
from vision.towers.temporal_patch import TemporalPatch, temporal_patches
from vlmserve.commands.bench.checkpoints import write_folder
from vlmserve.commands.bench.figures import Measure, bench_parser, in_turns, ratios, show_and_write
from vlmserve.commands.bench.vision import use_threads
from vlmserve.commands.plan.published import PUBLISHED
from vlmserve.models.random_weights import fill_randomly
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.compute.linear import pack_linears, share_workspace
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.compute.torchvision_shim import make_torchvision_importable
from vlmserve_common.kernels.library import torch_threads

_ABOUT = "From a sound to embeddings, beside the feature extractor and the audio tower of transformers."
SHAPES = {shape.what: shape for shape in PUBLISHED if shape.audio is not None}
_RATE = 16000
_BATCH = 1024  # vision patches, the encoder's batch on a CPU
_TARGET = 1.5
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2}


def main(argv: Sequence[str]) -> int:
    """Measure features, the tower, and both together."""
    parser = bench_parser("audio", _ABOUT, rounds=3)
    add = parser.add_argument
    add("--model-shape", choices=list(SHAPES), default="Qwen3-Omni-30B-A3B", help="whose audio tower")
    add("--layers", type=int, metavar="N", help="layers of the tower [default: all]")
    add("--seconds", type=int, default=60, metavar="N", help="length of the sound")
    add("--dtype", choices=list(_TOLERANCE), default="bfloat16", help="of the tower")
    args = parser.parse_args(argv)
    show_and_write(args, {"audio": measure(args)})
    return 0


def measure(args: argparse.Namespace) -> Iterator[Measure]:
    """Time both sides, by the clock."""
    shape, dtype = SHAPES[args.model_shape], getattr(torch, args.dtype)
    threads = available_cpus()
    used = use_threads(torch.device("cpu"), threads)
    with tempfile.TemporaryDirectory(prefix="vlmserve-bench-") as made:
        folder = write_folder(Path(made), shape)
        hf_config = read_hf_config(folder)
        audio = hf_config["vision_config"]["audio_config"]
        audio |= {"encoder_layers": args.layers} if args.layers else {}
        processor = make_processor(folder, hf_config)
        extractor, encoder = _reference(shape.family, audio, folder, dtype)
    tower = EARS[shape.family](audio).to("meta")
    give_memory(tower.to(dtype), "cpu")
    fill_randomly(tower)
    encoder.load_state_dict(tower.state_dict(), strict=False)
    share_workspace(tower)
    pack_linears(tower)
    data, samples = _sound(args.seconds)

    def parts() -> list[TemporalPatch]:
        return [patch for item in data_items(processor.process_audio(data), 2) for patch in temporal_patches(item)]

    def features() -> torch.Tensor:
        made = extractor(
            samples,
            sampling_rate=_RATE,
            padding="max_length" if shape.family == "qwen2_5_omni" else False,
            truncation=shape.family == "qwen2_5_omni",
            return_attention_mask=True,
            return_tensors="pt",
        )
        frames = int(made["attention_mask"].sum()) if shape.family == "qwen2_5_omni" else len(samples) // 160
        return made["input_features"][0, :, :frames].to(dtype)

    encode = partial(_encode, encoder)
    ours, theirs = _rows(tower, parts()), encode(features())
    off = float((ours.float() - theirs.float()).abs().max() / theirs.float().std())
    if not off < _TOLERANCE[args.dtype]:
        raise AssertionError(f"embeddings differ by {off:.2g} of their spread")
    about = f"{args.seconds} s of sound, {shape.what}, {audio['encoder_layers']} layers, {args.dtype}, {used}"
    given, heard = parts(), features()
    for name, mine, other in (
        ("features", parts, features),
        ("tower", lambda: _rows(tower, given), lambda: encode(heard)),
        ("features and tower", lambda: _rows(tower, parts()), lambda: encode(features())),
    ):
        sides = {
            "vlmserve": partial(_with_threads, torch_threads(threads, dtype), mine),
            "transformers": partial(_with_threads, threads, other),
        }
        timings = in_turns(sides, args.rounds)
        spread = ratios(timings["transformers"].wall, timings["vlmserve"].wall)
        target = _TARGET if name == "features and tower" else None
        yield Measure(
            name=f"{name}, times as fast",
            spread=spread,
            target=target,
            about=f"{about}; largest difference {off:.1e}",
            timings=timings,
        )


def _with_threads(threads: int, function: Callable[[], object]) -> object:
    """Let torch use so many threads for a call. Beside our operators it has one, as in a server: its threads spin for
    a while after each of its operators, and would take a core from ours."""
    torch.set_num_threads(threads)
    return function()


@torch.inference_mode()
def _rows(tower: AudioTower, patches: Sequence[TemporalPatch]) -> torch.Tensor:
    """Encode a sound in batches as the encoder pool does."""
    found, batch = [], list[TemporalPatch]()
    for patch in patches:
        if batch and sum(one.num_patches for one in [*batch, patch]) > _BATCH:
            found.append(_batch_rows(tower, batch))
            batch = []
        batch.append(patch)
    return torch.cat([*found, _batch_rows(tower, batch)])


def _batch_rows(tower: AudioTower, batch: Sequence[TemporalPatch]) -> torch.Tensor:
    return finish(tower.steps(batch, [patch.num_patches // 4 for patch in batch], UNLIMITED))


@torch.inference_mode()
def _encode(encoder: Any, features: torch.Tensor) -> torch.Tensor:
    rows: torch.Tensor = encoder(features, feature_lens=torch.tensor([features.shape[1]])).last_hidden_state
    return rows


def _reference(family: str, audio: dict[str, Any], folder: Path, dtype: torch.dtype) -> tuple[Callable[..., Any], Any]:
    """Return transformers' feature extractor, and its audio tower without weights."""
    make_torchvision_importable()
    from transformers import WhisperFeatureExtractor
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as old
    from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as new

    encoder: Any = old.Qwen2_5OmniAudioEncoder if family == "qwen2_5_omni" else new.Qwen3OmniMoeAudioEncoder
    config = encoder.config_class(**audio)
    config._attn_implementation = "sdpa"
    extractor: Any = WhisperFeatureExtractor.from_pretrained(folder)
    return extractor, encoder(config).to(dtype).eval()


def _sound(seconds: int) -> tuple[bytes, np.ndarray]:
    """Return a WAV file with something like the rhythm and the pitches of speech, and its samples float32."""
    rng, time = np.random.default_rng(0), np.arange(seconds * _RATE) / _RATE
    sound = 0.01 * rng.standard_normal(len(time))
    for harmonic in range(1, 12):
        pitch = 120 * harmonic + 20 * harmonic * np.sin(2 * np.pi * 0.4 * time)
        sound += 0.2 / harmonic * np.sin(2 * np.pi * np.cumsum(pitch) / _RATE) * (np.sin(2 * np.pi * 3 * time) > -0.3)
    levels = (sound.clip(-0.99, 0.99) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setnchannels(1)
        out.setsampwidth(2)
        out.setframerate(_RATE)
        out.writeframes(levels.tobytes())
    return file.getvalue(), levels.astype(np.float32) / 32768
