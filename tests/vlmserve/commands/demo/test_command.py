"""`vlmserve demo` as a user starts it and stops it."""

from __future__ import annotations

import asyncio
import os
import re
import select
import signal
import subprocess
import sys
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import httpx2
import pytest

from tests.vlmserve.api.fake_engine import MODEL
from tests.vlmserve.commands.demo.demo_process import Demo
from tests.vlmserve.commands.served import fake_server
from tests.vlmserve.server_process import ROOT, gone, private_directories
from vlmserve import cli
from vlmserve.api.listening import listen
from vlmserve.commands.bench.processes import children_of
from vlmserve.commands.client.chat_client import ChatClient
from vlmserve.commands.client.own_server import ChatTarget
from vlmserve.commands.demo.command import DemoError, WaitingPage, _with_adapter
from vlmserve_common.installing import install

_NO_GRADIO = """
import sys
from importlib.machinery import PathFinder
class Finder:
    def find_spec(self, name, path=None, target=None):
        return None if name == "gradio" else PathFinder.find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Finder()
from vlmserve import cli
sys.exit(cli.main(["demo"]))
"""


_OWNER = """
import signal, sys
from vlmserve.commands.client.own_server import OwnServer
server = OwnServer(sys.argv[1:])
print(server.pid, flush=True)
signal.pause()
"""


@pytest.fixture
def demo(tmp_path):
    with closing(Demo(tmp_path, "--num-threads", "1", "--dtype", "float32")) as demo:
        yield demo


def test_it_says_at_once_what_it_is_doing_and_can_be_stopped_then(tmp_path):
    with closing(Demo(tmp_path)) as demo:
        shown = f"{demo.url} can be opened now, and shows the progress until the page is there\n"
        assert demo.first_words == f"Starting the model's server and loading the page: {shown}"
        assert "Starting the model&#x27;s server ..." in httpx2.get(demo.url).text
        demo.process.send_signal(signal.SIGINT)
        assert demo.process.communicate(timeout=60) == ("", "")
    assert demo.process.returncode == 0
    assert list(demo.temporary.iterdir()) == []


@pytest.mark.slow
def test_a_picture_and_a_clip_and_then_nothing_is_left(demo):
    assert demo.ready() == "vlmserve-default"
    _, history, *_, saw = demo.ask("Describe the picture.", "shapes.png")
    assert history[-1]["content"][0]["text"] == "A red circle, a green triangle, a yellow star and a blue square."
    assert "448×320 resized to 256×160 pixels" in saw
    history = demo.ask("What happens in the video?", "turns-green.mp4")[1]
    assert history[-1]["content"][0]["text"] == "A blue square turns green."
    processes = children_of(demo.process.pid)
    directories = [path for pid in processes for path in private_directories(pid)]
    assert len(processes) >= 3
    assert any(path.is_relative_to("/dev/shm") for path in directories)
    demo.process.send_signal(signal.SIGINT)
    assert demo.process.wait(60) == 0
    assert all(map(gone, processes))
    assert not any(path.exists() for path in directories)
    assert list(demo.temporary.iterdir()) == []


def test_a_running_server_is_used_and_left_alone(checkpoint, tmp_path):
    with fake_server(checkpoint, api_key="secret") as (served, url):
        served.scheduler.say("red")
        with closing(Demo(tmp_path / "demo", "--url", f"{url}/v1", "--api-key", "secret")) as demo:
            assert demo.ready() == MODEL
            assert children_of(demo.process.pid) == []
            assert demo.ask("What is it?", "red-circle.png")[1][-1]["content"][0]["text"] == "red"
            demo.process.send_signal(signal.SIGTERM)
            assert demo.process.wait(60) == 0
        assert asyncio.run(ChatClient(url, api_key="secret").model()) == MODEL, "it is still there"


@pytest.mark.slow
def test_an_own_server_ends_even_if_who_started_it_is_killed(tmp_path):
    words = [sys.executable, "-c", _OWNER, "--num-threads", "1", "--log-level", "warning"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(words, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        server = os.pidfd_open(int(owner.stdout.readline()))
        owner.kill()
    try:
        assert select.select([server], [], [], 60)[0]
    finally:
        os.close(server)


def test_without_gradio_it_says_what_to_install():
    done = subprocess.run([sys.executable, "-c", _NO_GRADIO], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == f"vlmserve: error: the demo needs Gradio: {install('demo')}\n"


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--url", "http://x", "Qwen/Qwen3-VL-2B-Instruct"], "'Qwen/Qwen3-VL-2B-Instruct' has no place here"),
        (["--url", "http://x", "--page-size", "1"], "'--page-size' has no place here"),
        (["--api-key", "x"], "--api-key goes with --url"),
        (["--port", "65536"], "--port is 65536; it must be between 0 and 65535"),
    ],
)
def test_a_wrong_command_line_ends_with_2(words, complaint, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["demo", *words])
    assert caught.value.code == 2
    assert complaint in capsys.readouterr().err


def test_a_taken_port_is_told_before_anything_is_started(capsys):
    with closing(listen("127.0.0.1", 0)) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        assert cli.main(["demo", "--port", str(port)]) == 1
    assert capsys.readouterr().err.startswith(f"vlmserve: error: cannot listen on --host 127.0.0.1 --port {port}: ")


def test_an_adapter_of_the_server_is_chosen_by_name():
    async def models() -> list[str]:
        return ["base", "captions"]

    served = ChatTarget(client=cast(Any, SimpleNamespace(models=models)), model="base")
    assert [_with_adapter(served, name).model for name in (None, "captions")] == ["base", "captions"]
    with pytest.raises(DemoError, match="--adapter is 'other'; the server has 'base', 'captions'"):
        _with_adapter(served, "other")


def test_nobody_at_the_url(monkeypatch, capsys):
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert cli.main(["demo", "--port", "0", "--url", "http://127.0.0.1:9/v1"]) == 1
    assert "no answer from http://127.0.0.1:9/v1: " in capsys.readouterr().err


def test_it_says_what_is_being_done_and_makes_room():
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with WaitingPage(listener, "Starting <it> ...") as waiting:
        first = httpx2.get(url)
        assert first.status_code == 200, "browsers log errors on their console"
        assert re.search(r"Starting &lt;it&gt; \.\.\. \(\d+ s so far\)", first.text)
        waiting.doing = "Loading"
        assert re.search(r"Loading \(\d+ s so far\)", httpx2.get(url + "any/path").text)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    with closing(listen("127.0.0.1", port)) as again:  # as who comes next does
        again.listen()
