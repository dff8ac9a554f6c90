"""The wheel: everything that the packages hold is in it, and it serves without a checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest

from tests.vlmserve.server_process import ROOT, SAMPLES, ServerProcess, data_url

PACKAGES = ("processors", "vision", "vlmserve", "vlmserve_common")
BUILD = "import sys, setuptools.build_meta as backend; backend.build_wheel(sys.argv[1])"
SHOW = f"import {', '.join(PACKAGES)}; print(*(module.__file__ for module in ({', '.join(PACKAGES)})))"


def build(folder: Path, *, weights: bool) -> Path:
    """Build the wheel of a tree without git. weights: False leaves the model's weights empty."""
    tree = folder / "tree"
    for name in (*PACKAGES, "assets/default-model", "assets/samples"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("LICENSE", "README.md", "pyproject.toml"):
        shutil.copy(ROOT / name, tree)
    if not weights:
        (tree / "assets/default-model/model.safetensors").write_bytes(b"")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SETUPTOOLS_SCM")}
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [wheel] = folder.glob("*.whl")
    return wheel


def test_all_files_of_the_packages_are_in_it(tmp_path: Path) -> None:
    wheel = zipfile.ZipFile(build(tmp_path, weights=False))
    tree = tmp_path / "tree"
    files = {
        str(Path(folder, file).relative_to(tree))
        for package in PACKAGES
        for folder, _folders, names in os.walk(tree / package, followlinks=True)
        for file in names
    }
    [info] = {name.partition("/")[0] for name in wheel.namelist() if name.partition("/")[0] not in PACKAGES}
    assert {name for name in wheel.namelist() if not name.startswith(info)} == files
    needed = "vlmserve/default_model/model.safetensors", "vlmserve_common/kernels/cpp/linear.cpp", "vlmserve/py.typed"
    assert {*needed, "vlmserve/api/front_page.html", "vlmserve/commands/demo/samples/samples.json"} <= files
    about = message_from_bytes(wheel.read(f"{info}/METADATA"))
    assert (about["Name"], about["Version"]) == ("vlmserve", "0.1.dev0"), "without git"
    assert (about["License-Expression"], about["License-File"]) == ("Apache-2.0", "LICENSE")
    assert f"{info}/licenses/LICENSE" in wheel.namelist()
    assert "vlmserve = vlmserve.__main__:main" in wheel.read(f"{info}/entry_points.txt").decode()


@pytest.mark.slow
def test_it_serves_without_a_checkout(tmp_path: Path) -> None:
    """The environment has nothing of vlmserve but the wheel; what vlmserve needs is lent by this one."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    python = venv / "bin" / "python"
    [site] = venv.glob("lib/python*/site-packages")
    # As a line of a .pth file, a folder's own .pth files, such as that of an editable install, are not read.
    (site / "lent.pth").write_text(str(Path(pytest.__file__).parents[1]) + "\n")
    wheel = build(tmp_path, weights=True)
    install = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*install, str(wheel)], check=True)
    shutil.rmtree(tmp_path / "tree")
    alone = {**os.environ, "PYTHONPATH": ""}
    shown = subprocess.run([python, "-c", SHOW], cwd=tmp_path, env=alone, capture_output=True, text=True, check=True)
    assert [Path(file).parents[1] for file in shown.stdout.split()] == [site] * 4
    command = [str(venv / "bin" / "vlmserve")]
    version = subprocess.run([*command, "--version"], env=alone, capture_output=True, text=True, check=True)
    assert version.stdout == "vlmserve 0.1.dev0\n"
    runtime = tmp_path / "run"
    server = ServerProcess([*command, *["serve", "--port", "0", "--num-threads", "1"]], runtime, PYTHONPATH="")
    try:
        content = [
            {"type": "image_url", "image_url": {"url": data_url(SAMPLES / "six.png")}},
            {"type": "text", "text": "How many circles are there?"},
        ]
        body = {"model": "vlmserve-default", "messages": [{"role": "user", "content": content}], "max_tokens": 16}
        status, answer = server.post("v1/chat/completions", **body)
        assert (status, answer["choices"][0]["message"]["content"]) == (200, "Six.")
        assert server.get("")[1].startswith("<!DOCTYPE html>")
    finally:
        server.end()
