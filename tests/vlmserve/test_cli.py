"""The command line: what is printed, and the exit status."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from vlmserve import __version__, cli
from vlmserve.api import launch
from vlmserve.config.fields import flag
from vlmserve.config.settings import ServerSettings, iter_settings
from vlmserve_common.errors import CheckpointError, EngineError, SettingsError

_EXAMPLES = ("--page-size", "--disable-radix-cache", "--no-disable-radix-cache")  # of the text before the flags


def test_serve_takes_its_settings_from_flags(launched: list[ServerSettings]) -> None:
    words = "serve ./ckpt --port 0 --page-size 1 --enable-mixed-chunk --chunked-prefill-size -1 --dtype float32"
    assert cli.main(words.split()) == 0
    [settings] = launched
    assert settings.port == 0
    engine = settings.engine
    assert (engine.model, engine.page_size, engine.enable_mixed_chunk) == ("./ckpt", 1, True)
    assert (engine.chunked_prefill_size, engine.dtype) == (-1, "float32")


def test_switches_can_be_turned_off_again(launched: list[ServerSettings], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMSERVE_DISABLE_RADIX_CACHE", "1")
    assert cli.main(["serve"]) == 0
    assert cli.main(["serve", "--no-disable-radix-cache"]) == 0
    assert [settings.engine.disable_radix_cache for settings in launched] == [True, False]


def test_the_model_may_be_a_flag_but_not_two_models(
    launched: list[ServerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["serve", "--model", "a"]) == 0
    assert cli.main(["serve", "a", "--model", "a"]) == 0
    assert [settings.engine.model for settings in launched] == ["a", "a"]
    assert cli.main(["serve", "a", "--model", "b"]) == 2
    assert "MODEL is 'a' but --model is 'b'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["serve", "--page-size", "0"], "--page-size is 0; it must be 1 or more"),
        (["serve", "--config", "/no/such.yaml"], "/no/such.yaml: cannot be read"),
    ],
)
def test_wrong_settings_end_with_2(
    words: list[str], complaint: str, launched: list[ServerSettings], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("vlmserve: error: ")
    assert complaint in captured.err
    assert len(captured.err.splitlines()) == 1
    assert captured.out == ""
    assert launched == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (CheckpointError("no config.json in /x"), 2),
        (SettingsError("--max-model-len is 9999"), 2),
        (EngineError("a GPU is lost"), 1),
        (OSError("port 1 is taken"), 1),
    ],
)
def test_a_failure_is_one_line_and_2_where_the_user_has_to_change_something(
    error: Exception, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(settings: ServerSettings) -> int:
        raise error

    monkeypatch.setattr(launch, "launch_server", fail)
    monkeypatch.setitem(sys.modules, "vlmserve.commands.plan.command", SimpleNamespace(main=fail))
    assert cli.main(["plan"]) == status
    assert cli.main(["serve"]) == status
    assert capsys.readouterr().err == 2 * f"vlmserve: error: {error}\n"
    with pytest.raises(type(error)):
        cli.main(["serve", "--log-level", "debug"])


@pytest.mark.parametrize("word", ["--help", "--help-all"])
def test_help_shows_settings_in_two_levels(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve", word])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    listed = [line.split()[0].rstrip(",") for line in text.splitlines() if line.startswith("  --")]
    common = {flag(setting.name) for setting in iter_settings() if setting.common or word == "--help-all"}
    assert sorted(listed) == sorted([*common, "--config", "--help-all", *_EXAMPLES])
    assert "[default: 8000]" in text
    assert max(map(len, text.splitlines())) <= 120


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"vlmserve {__version__}\n"


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from vlmserve import cli\n"
        "try: cli.main(['serve', '--help'])\n"
        "except SystemExit: pass\n"
        "heavy = {'torch', 'pydantic', 'zmq', 'fastapi', 'transformers', 'numpy'}\n"
        "print(*sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == "\n"


@pytest.mark.parametrize(("command", "module"), [("serve", "difflib"), ("serve", "pydantic"), ("plan", "difflib")])
def test_ctrl_c_while_modules_are_imported_ends_without_a_word(command: str, module: str, tmp_path: Path) -> None:
    (tmp_path / f"{module}.py").write_text("import signal; signal.raise_signal(signal.SIGINT)")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    words = [sys.executable, "-m", "vlmserve", command]
    done = subprocess.run(words, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_a_tool_that_is_terminated_clears_away_what_it_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def main(words: list[str]) -> int:
        with tempfile.TemporaryDirectory(dir=tmp_path):
            signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setitem(sys.modules, "vlmserve.commands.bench.serve", SimpleNamespace(main=main))
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        cli.main(["bench", "serve"])
    assert stopped.value.code == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) == before
