"""Imports stay light: what each part may load, and what it must do without."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}} (kept away by this test)", name=name)
sys.meta_path.insert(0, Block())
"""


def _run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _loaded_by(statement: str, names: set[str]) -> set[str]:
    return set(_run(f"{statement}\nimport sys; print(*({names!r} & set(sys.modules)))").split())


def test_the_package_itself_is_light() -> None:
    assert _loaded_by("import vlmserve", {"torch", "numpy", "transformers", "pydantic", "zmq"}) == set()


def test_the_offline_engine_needs_nothing_of_the_service() -> None:
    blocked = {"av", "fastapi", "flashinfer", "gradio", "msgspec", "ray", "starlette", "uvicorn", "zmq"}
    _run(
        BLOCK.format(blocked=blocked)
        + "import vlmserve.engine.build, vlmserve.commands.offline.llm\nfrom vlmserve import *"
    )


def test_the_blocker_blocks() -> None:
    with pytest.raises(AssertionError, match="kept away by this test"):
        _run(BLOCK.format(blocked={"zmq"}) + "import vlmserve.ipc.sockets")


def test_the_detokenizer_process_needs_no_torch() -> None:
    _run(
        BLOCK.format(blocked={"torch", "transformers", "fastapi"})
        + "import vlmserve.frontend.detokenizer_process, vlmserve.api.launch"
    )


def test_serving_needs_no_torchvision_and_no_model_class_of_transformers() -> None:
    statement = "import vlmserve.engine.build, vlmserve.api.app, vlmserve.frontend.detokenizer_process"
    told = "import sys; print(*(m for m in sys.modules if m.startswith('transformers.models')))"
    loaded = _run(BLOCK.format(blocked={"torchvision"}) + f"{statement}\n{told}")
    assert [name for name in loaded.split() if ".modeling_" in name] == []


def test_the_api_process_leaves_torch_to_its_media_processes() -> None:
    blocked = {"torch", "transformers"}
    _run(BLOCK.format(blocked=blocked) + "import vlmserve.api.app, processors.pool.process_maker")


def test_the_router_holds_no_model_and_imports_nothing_of_one() -> None:
    blocked = {"av", "fastapi", "jinja2", "numpy", "PIL", "tokenizers", "torch", "transformers", "zmq"}
    _run(BLOCK.format(blocked=blocked) + "import vlmserve.router.command, vlmserve.router.launch")
