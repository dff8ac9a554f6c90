"""`vlmserve doctor` as a user runs it, and single checks on machines that this one is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Any

import pytest

from tests.default_model import copy_default_model
from tests.quantized_checkpoints import make_quantized
from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve.server_process import ROOT
from vlmserve.commands.doctor import engine_probes, machine
from vlmserve.commands.doctor.command import PROBES, files_finding, media_findings, model_findings, model_folder
from vlmserve.commands.doctor.engine_probes import examine_attention, examine_model
from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.commands.doctor.machine import Nvidia, ask_nvidia, attention_findings, gpu_findings
from vlmserve.commands.doctor.packages import extra_findings, needed_findings, read_requirements
from vlmserve.config.model_path import DEFAULT_MODEL
from vlmserve.memory import sizing
from vlmserve.models.attention.base import AttentionSpec
from vlmserve.models.attention.choice import Candidate, Tried
from vlmserve.models.registry import outline_model
from vlmserve_common.compute.linear import Linear
from vlmserve_common.compute.memory import total_host_memory
from vlmserve_common.kernels import build, library


def run(*words: str, python: Path | str = sys.executable, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(python), "-m", "vlmserve.cli", "doctor", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of this machine and a model whose weights are cut off."""
    folder = tmp_path_factory.mktemp("model")
    copy_default_model(folder)
    weights = folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    done = run(str(folder), "--json")
    assert done.stderr == ""
    report = json.loads(done.stdout)
    assert done.returncode == 1
    return report


def section(report: dict[str, Any], name: str) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in report["findings"] if one["section"] == name}


def test_this_installation_is_well(report: dict[str, Any]) -> None:
    found = {name: section(report, name) for name in ("vlmserve", "media", "built-in model")}
    assert {one["status"] for each in found.values() for one in each.values()} == {"ok"}
    assert found["vlmserve"]["torch"]["data"]["import_error"] is None
    assert found["media"]["pictures"]["data"]["formats"][:3] == ["PNG", "JPEG", "WEBP"]
    assert found["media"]["sample video"]["data"]["frames"] == 32
    model = found["built-in model"]["model"]["data"]
    assert model["family"] == "qwen3_vl"
    assert model["kv_tokens"] > 0
    assert section(report, "machine")["memory"]["data"]["available_bytes"] > model["weight_bytes"]
    assert section(report, "GPU")["attention"]["status"] == "ok"
    assert section(report, "extras")["demo"]["status"] == "ok"


def test_a_broken_model_is_a_problem(report: dict[str, Any]) -> None:
    [broken] = section(report, "MODEL").values()
    assert broken["status"] == "problem"
    assert "truncated" in broken["text"]
    statuses = [one["status"] for one in report["findings"]]
    assert (statuses.count("problem"), statuses.count("note")) == (report["problems"], report["notes"])
    of_machine = [one for one in report["findings"] if one["section"] in ("machine", "GPU")]
    assert report["problems"] == 1 + sum(one["status"] == "problem" for one in of_machine)


def test_where_nothing_is_installed_it_says_so(tmp_path: Path) -> None:
    venv.create(tmp_path / "bare", with_pip=False)
    done = run(python=tmp_path / "bare" / "bin" / "python")
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert any(line.split()[:5] == ["problem", "torch", "is", "not", "installed,"] for line in lines)
    installs = f"-c {ROOT}/constraints.txt -e {ROOT}"
    assert sum(line.endswith(installs) for line in lines) == 1, "one command for all packages"
    assert any(line.endswith(f"-e '{ROOT}[demo]'") for line in lines)
    assert "not examined: ModuleNotFoundError: No module named 'torch'" in done.stdout
    assert any(line.split()[:2] == ["ok", "memory"] for line in lines)
    assert "Traceback" not in done.stdout


def test_a_library_that_crashes_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; os.kill(os.getpid(), 11)")
    (tmp_path / "numpy.py").write_text("raise OSError('libblas.so.3: not found')")
    done = run(PYTHONPATH=f"{tmp_path}:{ROOT}")
    assert done.returncode == 1
    assert "is installed, and cannot be imported: it crashed the process (SIGSEGV)" in done.stdout
    assert "is installed, and cannot be imported: OSError: libblas.so.3: not found" in done.stdout
    assert "-m pip install --force-reinstall 'torch>=" in done.stdout


def test_a_wrong_command_line_ends_with_2() -> None:
    done = run("a", "b")
    assert done.returncode == 2
    assert "vlmserve doctor: error: " in done.stderr


H100 = Nvidia(gpus=("NVIDIA H100, 81559 MiB, driver 570.1",), in_machine=True)
GPU = {
    "name": "NVIDIA H100",
    "capability": [9, 0],
    "free_bytes": 70 * 2**30,
    "total_bytes": 80 * 2**30,
    "error": None,
}


def torch(**facts: Any) -> Probed:
    return Probed(result={"version": "2.13.0", "cuda": None, "hip": None, "cuda_available": False, "gpus": [], **facts})


def by_name(findings: Any) -> dict[str, Finding]:
    return {finding.name: finding for finding in findings}


# ---- GPUs


WORKS = {"cuda": "13.0", "cuda_available": True}


@pytest.mark.parametrize(
    ("facts", "name", "status", "text", "remedy"),
    [
        ({"version": "2.13.0+cpu"}, "torch build", "problem", "leaves the NVIDIA GPU unused", "torch==2.13.0"),
        ({"cuda": "13.0"}, "torch build", "problem", "too old for CUDA 13.0", "update NVIDIA's driver"),
        (WORKS | {"gpus": [{**GPU, "error": "no kernel image"}]}, "torch build", "ok", "built for CUDA 13.0", None),
        (WORKS | {"gpus": [{**GPU, "error": "no kernel image"}]}, "cuda:0", "problem", "no kernel image", "2.13.0"),
        (WORKS | {"gpus": [GPU]}, "cuda:0", "ok", "capability 9.0: 80 GiB, 70 GiB free", None),
        (WORKS | {"gpus": [GPU]}, "driver", "ok", "NVIDIA H100, 81559 MiB, driver 570.1", None),
        (WORKS | {"gpus": [{**GPU, "capability": [7, 5]}]}, "cuda:0", "note", "bfloat16 needs", "--dtype float16"),
    ],
)
def test_torch_beside_a_gpu(
    monkeypatch: pytest.MonkeyPatch, facts: Any, name: str, status: str, text: str, remedy: Any
):
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    found = by_name(gpu_findings(H100, torch(**facts)))[name]
    assert found.status == status
    assert text in found.text
    assert found.remedy is None if remedy is None else (found.remedy or "").endswith(remedy)


ATTENTION = {
    "device": "cuda:0",
    "heads": "32 heads of 128 over 8, bfloat16",
    "compiler": "/usr/bin/gcc",
    "versions": {"flashinfer": None, "triton": "3.9.0"},
    "why_not": {"flashinfer": "pip install 'vlmserve[gpu]'", "triton": None},
    "backend": "triton",
}


def test_which_attention_a_gpu_gets() -> None:
    found = by_name(attention_findings(Probed(result=ATTENTION)))
    assert (found["flashinfer"].status, found["flashinfer"].text[:15]) == (Status.NOTE, "not installed: ")
    assert (found["triton"].status, found["triton"].text) == (Status.OK, "3.9.0: its trial passes")
    assert (found["attention"].status, found["attention"].data["backend"]) == (Status.OK, "triton")
    assert found["C compiler"].status is Status.OK
    nothing = {"compiler": None, "why_not": {"flashinfer": "no", "triton": "no"}, "backend": "torch"}
    found = by_name(attention_findings(Probed(result=ATTENTION | nothing)))
    assert found["attention"].text.startswith("torch, by --attention-backend auto")
    assert {one.status for one in found.values()} == {Status.NOTE}


@pytest.mark.parametrize(
    ("probed", "statuses"),
    [
        (Probed(result={"device": None}), [Status.OK]),
        (Probed(error="EngineError: broke"), [Status.PROBLEM]),
        (Probed(error="ModuleNotFoundError: no torch"), []),
    ],
)
def test_attention_on_a_cpu_and_where_its_trial_fails(probed: Probed, statuses: list[Status]) -> None:
    assert [one.status for one in attention_findings(probed)] == statuses


def test_the_trial_of_the_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert examine_attention() == {"device": None}
    seen = []
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (9, 0))

    def tried(candidate: Candidate, spec: AttentionSpec) -> Tried:
        seen.append(spec)
        return Tried(name=candidate.name, why_not="no" if candidate.name == "flashinfer" else None)

    monkeypatch.setattr(engine_probes, "try_candidate", tried)
    facts = examine_attention()
    assert (facts["why_not"], facts["backend"]) == ({"flashinfer": "no", "triton": None}, "triton")
    assert facts["heads"] == "32 heads of 128 over 8, bfloat16, cache of bfloat16"
    assert facts["versions"]["triton"] is not None
    assert str(seen[0].device) == "cuda:0"


def test_a_gpu_without_a_driver_is_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    device = tmp_path / "pci" / "0000:01:00.0"
    device.mkdir(parents=True)
    (device / "vendor").write_text("0x10de\n")
    (device / "class").write_text("0x030200\n")
    nvidia = ask_nvidia(tmp_path / "pci")
    assert (nvidia.gpus, nvidia.in_machine) == ((), True)
    driver = by_name(gpu_findings(nvidia, Probed(error="ImportError: broken")))["driver"]
    assert driver.status is Status.NOTE
    assert "there is no nvidia-smi" in driver.text


@pytest.mark.parametrize(
    ("script", "gpus", "trouble"),
    [
        (
            "echo 'NVIDIA H100, 81559, 570.1'; echo 'NVIDIA L4, 23034, 570.1'",
            ("NVIDIA H100, 81559 MiB, driver 570.1", "NVIDIA L4, 23034 MiB, driver 570.1"),
            None,
        ),
        ("echo 'Failed to initialize NVML'; exit 18", (), "Failed to initialize NVML"),
        ("exit 9", (), "status 9"),
    ],
)
def test_what_nvidia_smi_says(
    script: str, gpus: tuple[str, ...], trouble: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = tmp_path / "nvidia-smi"
    fake.write_text(f"#!/bin/sh\n{script}\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    nvidia = ask_nvidia(tmp_path / "no-pci")
    assert (nvidia.gpus, nvidia.trouble) == (gpus, trouble)


# ---- packages


def test_versions_out_of_bounds_and_extras(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "vlmserve"\ndependencies = ["numpy>=99,<100", "pillow", "no-such-package>=1"]\n'
        '[project.optional-dependencies]\ncaption = ["pyyaml", "no-such[x]>=2"]\ndev = ["pytest"]\n'
    )
    needed, extras = read_requirements(tmp_path)
    imports = {"numpy": Probed(result={}), "PIL": Probed(error="ImportError: libjpeg.so")}
    found = by_name(needed_findings(needed, imports))
    assert "is installed, and >=99,<100 is needed" in found["numpy"].text
    assert (found["numpy"].remedy or "").endswith("install 'numpy>=99,<100'")
    assert found["pillow"].text.endswith("is installed, and cannot be imported: ImportError: libjpeg.so")
    assert "is not installed, and >=1 is needed" in found["no-such-package"].text
    assert {one.status for one in found.values()} == {Status.PROBLEM}
    [extra] = extra_findings(extras)
    assert (extra.name, extra.status) == ("caption", Status.NOTE)
    assert extra.text == "no-such is not installed, and >=2 is needed"
    assert "[caption]" in (extra.remedy or "")


def test_without_a_checkout_the_installed_metadata_are_read(tmp_path: Path) -> None:
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "another"\n')
    needed, extras = read_requirements(tmp_path)
    assert {"torch", "pillow"} <= {one.name for one in needed}
    assert extras["demo"][0].name == "gradio"
    assert "dev" not in extras


# ---- machine


def test_a_cpu_without_bfloat16_is_noted(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("model name\t: Old Xeon\nflags\t\t: fpu avx2 avx512f\n")
    old = machine.cpu(cpuinfo)
    assert (old.status, old.data["instructions"]) == (Status.NOTE, ["avx2", "avx512f"])
    assert old.text.startswith("Old Xeon: ")
    cpuinfo.write_text("model name\t: New Xeon\nflags\t\t: fpu avx2 avx512f amx_bf16\n")
    assert machine.cpu(cpuinfo).status is Status.OK
    cpuinfo.write_text("Features\t: fp asimd bf16\n")
    arm = machine.cpu(cpuinfo)
    assert (arm.status, arm.data["instructions"]) == (Status.OK, ["asimd", "bf16"])


def test_operators_of_this_cpu_and_why_no_faster_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags\t\t: fpu avx2 fma f16c avx512f avx512bw avx512dq avx512vl avx512_vnni\n")
    monkeypatch.setenv("CXX", "true")
    monkeypatch.delenv("VLMSERVE_CPU_LEVEL", raising=False)
    monkeypatch.setattr(build, "SHIPPED", tmp_path / "shipped")
    monkeypatch.setattr(machine, "best_level", lambda words: build.best_level(words, "x86_64"))
    found = machine.operators(cpuinfo, tmp_path)
    assert (found.status, found.data["level"]) == (Status.OK, "avx512")
    assert found.text == (
        "for avx512 (this CPU lacks avx512_bf16, avx512vbmi for avx512_bf16), "
        "to be built with true at the first start: takes seconds"
    )
    monkeypatch.setenv("PATH", "")
    lacking = machine.operators(cpuinfo, tmp_path)
    assert (lacking.status, lacking.remedy) == (Status.NOTE, "install a C++ compiler (apt-get install g++)")
    cpuinfo.write_text("flags\t\t: fpu avx fma f16c\n")
    old = machine.operators(cpuinfo, tmp_path)
    assert (old.status, old.remedy) == (Status.NOTE, None)
    assert old.text == "torch's, which are slower: there are none for a CPU without avx2"


@pytest.mark.parametrize(("mib", "status"), [(64, Status.PROBLEM), (512, Status.NOTE), (4096, Status.OK)])
def test_little_shared_memory(mib: int, status: Status, monkeypatch: pytest.MonkeyPatch) -> None:
    size = os.statvfs_result((4096, 4096, mib * 256, mib * 256, mib * 256, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda path: size)
    found = machine.shared_memory(Path("/dev/shm"))
    assert found.status is status
    assert bool(found.remedy) is (status is not Status.OK)


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resource.getrlimit", lambda which: (256, 4096))
    assert machine.open_files().status is Status.NOTE


def test_the_limit_of_a_container_is_told(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/a/b\n")
    for folder, limit in (("a/b", "max"), ("a", "1073741824")):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / "memory.max").write_text(limit)
        (tmp_path / folder / "memory.current").write_text("100")
        (tmp_path / folder / "memory.stat").write_text("")
    total, limit = total_host_memory(tmp_path, tmp_path)
    assert total > 2**30
    assert limit == 2**30


# ---- media and models


def test_formats_that_cannot_be_read() -> None:
    probed: dict[str, Probed] = {name: Probed(result={}) for name in PROBES}
    probed["picture:AVIF"] = Probed(error="KeyError: 'AVIF'")
    probed["picture:JPEG"] = Probed(error="OSError: decoder jpeg not available")
    probed["sample:rolling.mp4"] = Probed(error="ModuleNotFoundError: No module named 'av'")
    found = by_name(media_findings(probed))
    assert found["pictures"].text == "PNG, WEBP can be read"
    assert [found[name].status for name in ("AVIF", "JPEG", "sample picture", "sample video")] == [
        *(Status.NOTE, Status.PROBLEM, Status.OK, Status.NOTE)
    ]


def test_the_built_in_model_is_as_it_was_made(tmp_path: Path) -> None:
    # after a change of its files: cd assets/default-model && sha256sum *.jinja *.json *.safetensors > SHA256SUMS
    assert files_finding() == files_finding(DEFAULT_MODEL)
    assert files_finding().status is Status.OK
    folder = tmp_path / "copy"
    shutil.copytree(DEFAULT_MODEL, folder)
    named = {line.split()[1] for line in (folder / "SHA256SUMS").read_text().splitlines()}
    assert named == {path.name for path in folder.iterdir()} - {"README.md", "SHA256SUMS"}
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(10**6)
        file.write(b"?")
    damaged = files_finding(folder)
    assert (damaged.status, damaged.data["wrong"]) == (Status.PROBLEM, ["model.safetensors"])
    (folder / "config.json").unlink()
    assert "config.json: No such file" in files_finding(folder).text


def test_a_model_and_the_memory_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy_default_model(tmp_path)
    monkeypatch.setattr(sizing, "free_memory", lambda device: (2**34, 2**34))
    fits = examine_model(str(tmp_path))
    assert fits["kv_tokens"] > 0
    assert fits["error"] is None
    assert {one.status for one in model_findings("tiny", Probed(result=fits))} == {Status.OK}
    monkeypatch.setattr(sizing, "free_memory", lambda device: (fits["weight_bytes"] - 1, 2**34))
    found = by_name(model_findings("tiny", Probed(result=examine_model(str(tmp_path)))))
    assert found["tiny"].status is Status.OK
    assert found["memory for it"].status is Status.PROBLEM
    assert "the weights of" in found["memory for it"].text


def test_states_of_a_hybrid_model_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(HYBRID, tmp_path)
    monkeypatch.setattr(sizing, "free_memory", lambda device: (2**33, 2**33))
    facts = examine_model(str(folder))
    states, weights = facts["state_bytes"], facts["weight_bytes"]
    assert "; recurrent states take " in by_name(model_findings("tiny", Probed(result=facts)))["memory for it"].text
    monkeypatch.setattr(sizing, "free_memory", lambda device: (weights + states, 2**33))
    assert "states take" in examine_model(str(folder))["error"]
    monkeypatch.setattr(sizing, "free_memory", lambda device: (weights + 2 * states, 2**33))
    assert examine_model(str(folder))["error"] is None


def test_a_model_of_the_hub_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    found = model_folder("no-such-owner/no-such-model")
    assert isinstance(found, Finding)
    assert found.status is Status.NOTE
    assert "vlmserve serve no-such-owner/no-such-model" in (found.remedy or "")
    nowhere = model_folder("no-such-model")
    assert isinstance(nowhere, Finding)
    assert nowhere.status is Status.PROBLEM


def test_weights_of_a_few_bits_are_counted_as_the_engine_holds_them(tmp_path: Path) -> None:
    plain = make_checkpoint("qwen3_vl", tmp_path / "plain", tied=False)
    made, _ = make_quantized(plain, tmp_path, "awq")
    outline = outline_model(plain)
    linears = sum(
        sizing.weight_bytes(part) for part in outline.language_model.layers.modules() if isinstance(part, Linear)
    )
    try:
        facts = examine_model(str(made))
    finally:
        library.activate("off", threads=1)
    # of 32 bits, and with a scale and a zero of 16 bits for 32 numbers
    assert facts["weight_bytes"] == sizing.weight_bytes(outline) - linears * (32 - 5) / 32
