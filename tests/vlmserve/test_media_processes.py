"""A server whose media are decoded in processes of their own, one of which is killed."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest
from PIL import Image

from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture
from tests.vlmserve.server_process import SAMPLES, ServerProcess, await_ends, await_that, gone, serving
from tests.vlmserve.server_process import media_part as part
from vlmserve_common.transport.shm import SPARE_BYTES, SharedArrays


@pytest.fixture
def serve(default_model: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts a server with more flags."""
    with contextlib.ExitStack() as stack:
        runs = itertools.count()
        yield lambda *flags: stack.enter_context(serving(tmp_path / f"run{next(runs)}", *flags, model=default_model))


def ask(client: openai.OpenAI, *parts: dict[str, Any]) -> Any:
    content = [*parts, {"type": "text", "text": "What is there?"}]
    answer = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], max_tokens=8, temperature=0
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens, getattr(answer, "mm_report", None)


def children_of(pid: int) -> set[int]:
    """Each thread has its own."""
    return {
        int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in (task / "children").read_text().split()
    }


def fork_server(server: ServerProcess) -> int:
    """What all other processes are forks of."""
    [pid] = (pid for pid in children_of(server.process.pid) if "forkserver" in Path(f"/proc/{pid}/cmdline").read_text())
    return pid


def media_workers(server: ServerProcess) -> set[int]:
    forks = children_of(fork_server(server))
    return {pid for pid in forks if Path(f"/proc/{pid}/comm").read_text().startswith("media-")}


def await_work(pids: set[int], under_way: Future[Any]) -> int:
    """The first of these processes that has taken some CPU time."""

    def used(pid: int) -> float:
        return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[11:13])) / 100

    before = {pid: used(pid) for pid in pids}
    while not under_way.done():
        for pid in pids:
            if used(pid) > before[pid] + 0.05:
                return pid
    raise AssertionError(f"too quick: {under_way.exception()}")


def test_the_same_answers_as_with_threads_and_a_killed_worker_harms_its_own_request(serve: Any) -> None:
    clip, shapes = make_clip(24), (SAMPLES / "shapes.png").read_bytes()
    large = encoded(picture(1200, 900), "PNG")
    asked = [[part("image", shapes)], [part("video", clip)], [part("image", large), part("video", clip)]]
    threads, processes = serve("--media-processes", "0"), serve("--processor-cache-mib", "16")
    with threads.client() as client:
        want = [ask(client, *parts) for parts in asked]
    threads.end()
    with processes.client() as client, ThreadPoolExecutor(8) as others:
        assert [ask(client, *parts) for parts in asked] == want
        with pytest.raises(openai.BadRequestError, match="the video is broken or cut off") as caught:
            ask(client, part("video", clip[: len(clip) // 2]))
        assert caught.value.param == "messages[0].content[0]"

        first = media_workers(processes)
        assert len(first) == 2
        huge = encoded(Image.new("RGB", (8000, 7900)))  # takes a second or more
        doomed = others.submit(ask, client, part("image", huge))
        victim = await_work(first, doomed)
        answers = [others.submit(ask, client, *parts) for parts in asked]
        os.kill(victim, signal.SIGSEGV)  # as a decoder does that crashes
        with pytest.raises(openai.BadRequestError, match="was killed by SIGSEGV") as caught:
            doomed.result()
        assert (caught.value.code, caught.value.param) == ("media_crash", "messages[0].content[0]")
        assert [answer.result() for answer in answers] == want
        processes.await_log(r"media worker \d was killed by SIGSEGV: starting it again")
        with pytest.raises(openai.BadRequestError, match="it is not tried again"):
            ask(client, part("image", huge))
        assert [ask(client, *parts) for parts in asked] == want
        assert "libtorch" not in Path(f"/proc/{processes.process.pid}/maps").read_text()

    await_that(lambda: len(media_workers(processes)) == 2)  # one has just begun, and is not called so at once
    forks = fork_server(processes)
    children = children_of(forks)
    assert children == {*processes.children().values(), *media_workers(processes)}
    assert len(children) == 4
    forks_end = os.pidfd_open(forks)
    [shared] = (SharedArrays(path) for path in processes.directories() if "/shm/" in str(path))
    assert shared.outstanding() == 0
    assert sum(path.stat().st_size for path in shared.directory.iterdir()) <= SPARE_BYTES
    directories = processes.directories()
    assert len(directories) == 3
    processes.process.send_signal(signal.SIGINT)
    assert processes.wait() == 0
    assert all(gone(pid) for pid in children)
    await_ends([forks_end])  # it ends of itself, once it sees that the server is gone
    assert not any(path.exists() for path in directories)
    assert not re.search("Traceback", "".join(processes.log))


def test_a_server_that_is_killed_leaves_no_process(serve: Any) -> None:
    server = serve()
    server.port()
    forks = fork_server(server)
    watched = [os.pidfd_open(pid) for pid in (forks, *children_of(forks))]
    assert len(watched) == 5
    server.process.kill()
    await_ends(watched)
