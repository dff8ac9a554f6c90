"""Two nodes with networks and process numbers of their own, as on two machines, have a server together."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.parallel.sharing import GREEDY, SETTINGS
from tests.vlmserve.server_process import ServerProcess
from vlmserve import LLM
from vlmserve.commands.bench.processes import children_of

PORT = 29500  # free: nothing else is in these networks
_ASK = """
import json, sys, urllib.request
body = {"model": "m", "messages": [{"role": "user", "content": "Name a colour."}], "temperature": 0.0, "max_tokens": 8,
        "ignore_eos": True}
url = f"http://127.0.0.1:{sys.argv[1]}/v1/chat/completions"
request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
print(urllib.request.urlopen(request, timeout=60).read().decode())
"""


class Hosts:
    """Two network namespaces with a cable between them, and addresses 10.9.8.1 and 10.9.8.2 at its ends."""

    def __init__(self) -> None:
        self.names = [f"vlmserve-{os.getpid()}-{number}" for number in range(2)]
        self.ends = ends = [f"vs{os.getpid()}{letter}" for letter in "ab"]
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", ends[0], "netns", self.names[0], "type", "veth", "peer", ends[1], "netns", self.names[1])
        for number, (name, end) in enumerate(zip(self.names, ends, strict=True), 1):
            ip("-n", name, "address", "add", f"10.9.8.{number}/24", "dev", end)
            for link in ("lo", end):
                ip("-n", name, "link", "set", link, "up")

    def command(self, number: int) -> list[str]:
        """What a command begins with that is to run on one; its processes are not seen from the other."""
        own_processes = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
        return ["ip", "netns", "exec", self.names[number], *own_processes]

    def remove(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    if shutil.which("ip") is None or shutil.which("unshare") is None or os.geteuid():
        pytest.skip("network namespaces take root and iproute2; test_servers.py has two nodes by ports")
    hosts = Hosts()
    yield hosts
    hosts.remove()


def node(hosts: Hosts, number: int, folder: Path, runtime: Path, *more: str) -> ServerProcess:
    words = [*hosts.command(number), sys.executable, "-m", "vlmserve.cli", "serve", str(folder), "--port", "0"]
    words += ["--served-model-name", "m", *more]
    words += [word for name, value in SETTINGS.items() for word in ("--" + name.replace("_", "-"), str(value))]
    return ServerProcess(words, runtime, OMP_NUM_THREADS="1")


def answer_on(hosts: Hosts, number: int, server: ServerProcess) -> str:
    asking = [*hosts.command(number), sys.executable, "-c", _ASK, str(server.port())]
    found = json.loads(subprocess.run(asking, check=True, capture_output=True, timeout=60).stdout)
    return found["choices"][0]["message"]["content"]


@pytest.mark.slow
def test_they_meet_by_address_and_a_dead_host_ends_the_server(hosts: Hosts, tmp_path: Path):
    folder = make_checkpoint("qwen3_vl", tmp_path / "model")
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY).text
    together = ("--tp-size", "2", "--nnodes", "2", "--dist-init-addr", f"10.9.8.1:{PORT}")
    nodes = [
        node(hosts, number, folder, tmp_path / f"run{number}", *together, "--node-rank", str(number))
        for number in range(2)
    ]
    try:
        nodes[1].await_log(f"ready: ranks 1 work for 10.9.8.1:{PORT}")
        assert answer_on(hosts, 0, nodes[0]) == alone
        os.kill(children_of(nodes[1].process.pid)[0], signal.SIGKILL)  # the first process, and all others with it
        nodes[1].wait()
        assert nodes[0].wait() == 1  # with nothing to compute
        assert "rank 1 of 2 is gone" in "".join(nodes[0].log)
    finally:
        for one in nodes:
            one.end()


@pytest.mark.slow
def test_kv_goes_from_one_host_to_the_other_until_that_is_gone(hosts: Hosts, tmp_path: Path):
    folder, place = make_checkpoint("qwen3_vl", tmp_path / "model"), f"10.9.8.1:{PORT}"
    with LLM(str(folder), **SETTINGS) as llm:
        alone = llm.chat("Name a colour.", GREEDY).text
    prefill = node(hosts, 0, folder, tmp_path / "prefill", "--role", "prefill", "--prefill-listen", place)
    links = ("--role", "decode", "--prefill-urls", f"tcp://{place}", "--prefill-peer-timeout-s", "2")
    decode = node(hosts, 1, folder, tmp_path / "decode", *links, "--disable-radix-cache")
    try:
        prefill.port()
        decode.await_log(f"prefill server tcp://{place} takes orders")
        assert answer_on(hosts, 1, decode) == alone
        assert "computed" not in "".join(decode.log)
        ip("-n", hosts.names[0], "link", "set", hosts.ends[0], "down")
        assert answer_on(hosts, 1, decode) == alone
        decode.await_log("was not heard for 2 s")
        ip("-n", hosts.names[0], "link", "set", hosts.ends[0], "up")
        known = len("".join(decode.log))
        decode.await_log(f"(?s).{{{known}}}.*takes orders")
    finally:
        for one in (prefill, decode):
            one.end()
