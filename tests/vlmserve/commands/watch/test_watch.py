"""`vlmserve watch`: a file is played, and answers come while it plays."""

import re
import threading

import pytest

from tests.processors.clips import make_clip
from tests.vlmserve.api.fake_engine import write_checkpoint_folder
from tests.vlmserve.commands.served import fake_server
from vlmserve.commands.client.chat_client import ServerError
from vlmserve.commands.watch.command import main
from vlmserve.commands.watch.source import SourceError, play


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_checkpoint_folder(tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture
def clip(tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(make_clip(40))
    return str(path)


def test_a_file_is_played_at_its_speed(clip):
    now, times = [0.0], []
    ended = threading.Event()
    ended.wait = lambda seconds: now.__setitem__(0, now[0] + seconds)  # the only thing that takes time
    play(
        clip, lambda time, file: times.append((round(now[0], 3), round(time, 3))), ended, fps=2.0, clock=lambda: now[0]
    )
    assert times == [(at / 2, at / 2) for at in range(8)]
    now[0] = 0.0
    play(clip, lambda *_: ended.set(), ended, fps=2.0, clock=lambda: now[0])
    assert now == [0.0], "the first frame ended it"


def test_answers_come_while_it_plays(folder, clip, capsys):
    with fake_server(folder) as (served, url):
        served.scheduler.say("A bar.")
        words = [clip, "What?", "--url", url, "--every", "0.1", "--fps", "2", "--speed", "4", "--max-tokens", "9"]
        assert main([*words, "--system", "Be brief."]) == 0
        asked = served.scheduler.requests[-1]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= 3
    assert all(re.fullmatch(r" *0:0\d\.\d  A bar\.", line) for line in lines)
    assert lines[-1].split()[0] == "0:03.5"
    assert len(asked.mm_inputs.items[0].patch_digests) == 4
    assert asked.sampling_params.max_new_tokens == 9


def test_what_cannot_be_watched(folder, tmp_path):
    with fake_server(folder) as (_, url):
        for source in (str(tmp_path / "none.mp4"), __file__):
            with pytest.raises(SourceError, match=r"no file|cannot be played"):
                main([source, "What?", "--url", url])
    with pytest.raises(ServerError):
        main([__file__, "What?", "--url", "http://127.0.0.1:1"])
