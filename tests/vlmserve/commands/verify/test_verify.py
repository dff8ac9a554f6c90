"""`vlmserve verify` agrees where the models are the same, and says which case is not where they differ."""

from __future__ import annotations

import gc
import importlib.util
import json
import math
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.fp8_checkpoints import make_fp8
from tests.text_checkpoints import make_text_checkpoint
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRIDS, STREAMED, make_checkpoint

# isort: split
import numpy as np
from PIL import Image
from safetensors.torch import load_file, save_file

from tests.processors.clips import frame, make_clip, with_rotation
from vlmserve import cli
from vlmserve.commands.verify import answers, command
from vlmserve.commands.verify.answers import (
    Answer,
    Case,
    CaseFinding,
    RunSettings,
    Step,
    Verdict,
    compare,
    length_of,
    made_cases,
    own_case,
    read_frames,
)
from vlmserve.engine import rank_processes
from vlmserve.executor.model_runner import ModelRunner
from vlmserve_common.errors import EngineError
from vlmserve_common.installing import install, pip_install

SETTINGS = RunSettings(dtype="float32", device="cpu", max_tokens=8, num_threads=1)
# test_engine.py compares the engine itself with transformers, for each family
FEW_FAMILIES = [
    family if family == "qwen3_vl" else pytest.param(family, marks=pytest.mark.slow)
    for family in (*ALL_FAMILIES, *HYBRIDS, STREAMED)
]
FEW = ["--max-tokens", "8", "--num-threads", "1"]
TOLERANCE = 1e-4


def verify(ours: Path, theirs: Path, settings: RunSettings = SETTINGS) -> list[CaseFinding]:
    return command.run(ours, theirs, made_cases(("text", "image", "video")), settings, TOLERANCE)


def different(findings: list[CaseFinding]) -> set[str]:
    return {finding.case for finding in findings if finding.verdict is Verdict.DIFFERENT}


@pytest.fixture(scope="module", params=FEW_FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """What transformers answers about a checkpoint is computed once: most tests break our side."""
    compute, found = command.reference_answers, dict[str, list[Answer]]()

    def answers(folder: Path, cases: Sequence[Case], settings: RunSettings) -> list[Answer]:
        asked = repr((folder, cases, settings))
        if asked not in found:
            found[asked] = compute(folder, cases, settings)
        return found[asked]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "reference_answers", answers)
        yield


def test_every_family_agrees(folder: Path) -> None:
    findings = verify(folder, folder)
    assert [finding.why for finding in findings if finding.why] == []
    assert {finding.variant for finding in findings} == {"whole", "warm cache", "small chunks"}
    assert len(findings) == 3 * 6
    assert all(finding.equal_tokens == finding.tokens > 0 for finding in findings)
    for finding in findings:
        assert (finding.cached_tokens > 0) == (finding.variant == "warm cache")
        assert finding.prompt_tokens > 32 or finding.case == "text, several turns"  # more than a chunk


def test_a_model_that_reads_text_only_is_asked_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_text_checkpoint("qwen3", tmp_path)
    assert cli.main(["verify", str(folder), *FEW]) == 0
    assert "6 of 6 agree with transformers" in capsys.readouterr().out
    assert cli.main(["verify", str(folder), "--cases", "image", *FEW]) == 1
    assert "the model reads text only" in capsys.readouterr().err


@pytest.mark.slow
def test_processes_that_share_a_model_agree_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = []
    join = rank_processes.RankProcesses.wait_ready
    monkeypatch.setattr(rank_processes.RankProcesses, "wait_ready", lambda self: (ranks.append(self), join(self)))
    folder = make_checkpoint("qwen3_vl", tmp_path)
    assert cli.main(["verify", str(folder), "--cases", "text,image", "--tp-size", "2", *FEW]) == 0
    assert "12 of 12 agree with transformers" in capsys.readouterr().out
    assert len(ranks) == 2  # an engine for whole prompts, and one for chunks


@pytest.mark.slow
def test_other_weights_of_the_tower_show_wherever_it_looks(folder: Path, tmp_path: Path) -> None:
    ours = _copy(folder, tmp_path / "ours")
    tensors = load_file(ours / "model.safetensors")
    [name] = [name for name in tensors if name.endswith("visual.blocks.1.attn.proj.weight")]
    tensors[name] *= 1.02
    save_file(tensors, ours / "model.safetensors", metadata={"format": "pt"})
    found = verify(ours, folder)
    assert different(found) == {"image", "images, several turns", "video", "image and video"}


def test_both_sides_take_another_template(folder: Path, tmp_path: Path) -> None:
    figures, template = tmp_path / "figures.json", tmp_path / "template.jinja"
    template.write_text("{% for message in messages %}<|im_start|>{{ message.role }}<|im_end|>{% endfor %}")
    words = ["verify", str(folder), "--cases", "text", "--chat-template", str(template), "--json", str(figures), *FEW]
    assert cli.main(words) == 0
    findings = json.loads(figures.read_text())["findings"]
    assert max(finding["prompt_tokens"] for finding in findings) < 32, "roles alone are shorter than the questions"


def test_the_command_names_the_case_and_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The built-in model, with the reference's answers of its pictures from elsewhere."""
    other = _copy(command.resolve_model(""), tmp_path / "other")
    tensors = load_file(other / "model.safetensors")
    tensors["model.visual.merger.linear_fc2.weight"] *= -1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    answers = command.reference_answers
    monkeypatch.setattr(command, "reference_answers", lambda _, cases, settings: answers(other, cases, settings))
    assert cli.main(["verify", "--cases", "text,image", *FEW]) == 1
    printed = capsys.readouterr().out
    assert "DIFFERENT: image (whole): logprobs differ by " in printed
    assert "DIFFERENT: text" not in printed
    assert "6 of 12 agree with transformers" in printed


@pytest.mark.slow
def test_the_built_in_model_agrees_also_about_own_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And only one model is in memory at a time."""
    answers = command.reference_answers

    def alone(*args: object) -> object:
        gc.collect()
        assert not any(type(thing) is ModelRunner for thing in gc.get_objects())
        return answers(*args)

    monkeypatch.setattr(command, "reference_answers", alone)
    picture, clip, out = tmp_path / "a.png", tmp_path / "b.mp4", tmp_path / "out.json"
    layer = np.random.default_rng(0).integers(0, 256, (90, 130, 4), dtype=np.uint8)
    Image.fromarray(layer).save(picture)  # with transparency
    clip.write_bytes(make_clip(20))
    own = ["--picture", str(picture), "--video", str(clip), "--prompt", "What is this?", "--json", str(out)]
    assert cli.main(["verify", *own, *FEW]) == 0
    assert "3 of 3 agree with transformers" in capsys.readouterr().out
    assert {found["case"] for found in json.loads(out.read_text())["findings"]} == {"own"}
    assert cli.main(["verify", "--cases", "text", "--dtype", "bfloat16", *FEW]) == 0


EDITED = {"avoid_negative_ts": "disabled", "use_editlist": "1"}
CLIPS = {
    # no number of frames in the header
    "a.webm": {"frames": 25, "codec": "libvpx-vp9", "container": "webm"},
    "b.mkv": {"frames": 31, "codec": "libx264", "container": "matroska", "gop": 7},
    # an edit list that leaves out the first five
    "c.mp4": {"frames": 25, "gop": 5, "times": [100 * n for n in range(-5, 20)], "container_options": EDITED},
    "d.gif": {"frames": 9, "codec": "gif", "container": "gif"},
}


@pytest.mark.slow
def test_every_kind_of_clip_is_read_by_both_sides(folder: Path, tmp_path: Path) -> None:
    cases = []
    for name, made in CLIPS.items():
        (tmp_path / name).write_bytes(make_clip(**made))
        cases.append(own_case((), [tmp_path / name], "What?"))
    turned = tmp_path / "e.mp4"
    turned.write_bytes(with_rotation(make_clip(10), 90))
    cases.append(own_case((), [turned], "What?"))
    findings = command.run(folder, folder, cases, SETTINGS, TOLERANCE)
    assert len(findings) == 3 * len(cases)
    assert [finding.why for finding in findings if finding.why] == []


@pytest.mark.parametrize(
    ("made", "length"),
    [
        ({"frames": 12}, (12, 10.0)),
        ({**CLIPS["c.mp4"]}, (20, 10.0)),
        ({**CLIPS["a.webm"]}, (25, 10.0)),
        # 33 ms each from frame to frame and of the last one, and now and then 34
        ({"frames": 31, "fps": 30, "codec": "libvpx", "container": "webm"}, (31, 31 / 1.033)),
        (
            {"frames": 4, "times": [0, 40, 500, 900], "codec": "libx264", "container": "matroska"},
            (4, 4.0),  # the last one is said to last 0.1 s
        ),
    ],
    ids=str,
)
def test_a_clip_s_length_is_what_is_shown(made: dict[str, Any], length: tuple[int, float], tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(make_clip(**made))
    assert length_of(path) == pytest.approx(length)


def test_frames_are_read_by_number_and_may_repeat(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_clip(9))
    shown = read_frames(path, [1, 1, 4, 8])
    assert np.array_equal(shown, np.stack([frame(number, 112, 84) for number in (1, 1, 4, 8)]))
    path.write_bytes(with_rotation(make_clip(3), 90))
    assert np.array_equal(read_frames(path, [2])[0], np.rot90(frame(2, 112, 84), 3))


def test_it_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def not_here(name: str) -> None:
        return None

    monkeypatch.setattr(answers.importlib.util, "find_spec", not_here)
    with pytest.raises(EngineError):
        answers.check_reference_can_run()
    assert cli.main(["verify"]) == 1
    assert install("verify") in capsys.readouterr().err


@pytest.mark.slow
def test_weights_of_8_bit_floats_answer_as_the_same_dequantised(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_vl", tmp_path / "plain")
    ours, theirs = make_fp8(plain, tmp_path, "block", block=(24, 40), shards=2)
    assert {finding.verdict for finding in verify(ours, theirs)} == {Verdict.EQUAL}


def test_it_says_what_transformers_lacks_for_a_quantised_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made, _ = make_fp8(make_checkpoint("qwen3_vl", tmp_path / "plain"), tmp_path, "channel")
    here = importlib.util.find_spec
    monkeypatch.setattr(
        answers.importlib.util, "find_spec", lambda name: None if name == "compressed_tensors" else here(name)
    )
    assert cli.main(["verify", str(made)]) == 1
    assert (
        f"'compressed-tensors' with compressed_tensors: {pip_install('compressed-tensors')}\n"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--cases", "text,sound"], "'sound' is none of text, image, video"),
        (["--picture", "/no/such.png"], "there is no file '/no/such.png'"),
        (["--max-tokens", "0"], "'0' must be a whole number of 1 or more"),
        (["--tolerance", "-1"], "'-1' must be a number above 0"),
        (["--dtype", "int8"], "'int8' is none of float32, bfloat16, float16"),
    ],
)
def test_wrong_command_lines(words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *words])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


# ---- what counts as equal, as a near tie, and as different


def step(token: int, **logprobs: float) -> Step:
    """logprobs: of tokens t1, t2 ..., best first."""
    top = {int(name[1:]): value for name, value in logprobs.items()}
    return Step(token_id=token, logprob=top[token], top=top)


THEIRS = (step(1, t1=-0.1, t2=-2.5), step(2, t2=-0.70, t3=-0.71, t4=-3.0), step(5, t5=-0.2, t6=-1.7))


def found(*steps: Step, theirs: tuple[Step, ...] = THEIRS, prompt: int = 9, near_ties: bool = True) -> CaseFinding:
    ours, other = Answer(prompt_tokens=prompt, steps=steps), Answer(prompt_tokens=9, steps=theirs)
    return compare("case", "run", ours, other, tolerance=0.05, allow_near_ties=near_ties)


def test_equal() -> None:
    close = (step(1, t1=-0.11, t2=-2.46), *THEIRS[1:])
    finding = found(*close)
    assert (finding.verdict, finding.why) == (Verdict.EQUAL, "")
    assert (finding.equal_tokens, finding.tokens) == (3, 3)
    assert finding.logprob_difference == pytest.approx(0.01)
    assert finding.first_step_difference == pytest.approx(0.04)


def test_a_near_tie_is_one_of_16_bits_only() -> None:
    parted = (THEIRS[0], step(3, t3=-0.70, t2=-0.71), step(9, t9=-0.1))
    assert found(*parted).verdict is Verdict.NEAR_TIE
    assert found(*parted).equal_tokens == 1
    finding = found(*parted, near_ties=False)
    assert finding.verdict is Verdict.DIFFERENT
    assert finding.why == "token 1 is 3, the reference's is 2 (to it, ours is 0.01 below)"


@pytest.mark.parametrize("token", [4, 8])
def test_parting_elsewhere_is_different(token: int) -> None:
    """Far below the reference's best, or not among its most likely at all."""
    finding = found(THEIRS[0], step(token, **{f"t{token}": -0.7}))
    assert finding.verdict is Verdict.DIFFERENT
    assert finding.equal_tokens == 1


def test_logprobs_count_up_to_where_answers_part() -> None:
    tie = step(3, t3=-0.70, t2=-0.71)
    assert found(step(1, t1=-0.16, t2=-2.5), tie).verdict is Verdict.DIFFERENT
    after = (THEIRS[0], THEIRS[1], step(5, t5=-0.3, t6=-1.7))
    assert found(*after).why == "logprobs differ by 0.1, the tolerance is 0.05"


def test_the_first_step_is_compared_beyond_the_token_chosen() -> None:
    assert found(step(1, t1=-0.1, t2=-2.4), *THEIRS[1:]).verdict is Verdict.DIFFERENT
    missing = found(step(1, t1=-0.1, t7=-2.6), *THEIRS[1:])
    assert missing.first_step_difference == pytest.approx(0.1)


def test_lengths() -> None:
    assert found(*THEIRS, prompt=8).why == "the prompt has 8 tokens, the reference's 9"
    assert found(*THEIRS[:2]).why == "the answer has 2 tokens, the reference's 3"
    assert found(*THEIRS, theirs=THEIRS[:2]).why == "the answer has 3 tokens, the reference's 2"


def test_no_number_is_a_difference() -> None:
    assert found(step(1, t1=math.nan, t2=-2.5), *THEIRS[1:]).verdict is Verdict.DIFFERENT


def _copy(folder: Path, to: Path) -> Path:
    return Path(shutil.copytree(folder, to))
