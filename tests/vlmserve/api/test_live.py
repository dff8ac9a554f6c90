"""/v1/sessions/ID/frames: frames over a WebSocket, what questions see of them, standing questions, and bad clients."""

from __future__ import annotations

import base64
import io
import json
import re
import struct
import threading
import time
from contextlib import contextmanager
from fractions import Fraction
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import av
import numpy as np
import pytest
from PIL import Image
from starlette.testclient import WebSocketDenialResponse
from starlette.websockets import WebSocketDisconnect

from tests.processors.clips import frame, make_clip
from tests.processors.rtsp import camera
from tests.vlmserve.api.fake_engine import BODY, ids_of
from tests.vlmserve.api.test_sessions import CHAT, OPTIONS, URL, Session, text
from vlmserve.api.body import BodyBudget
from vlmserve.api.sessions.live import LiveVideo
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.live import LiveRules
from vlmserve_common.errors import BadRequestError

FPS = 2.0


def pixels(seed, size=(56, 28)):
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)


def file_of(seed, size=(56, 28)):
    file = io.BytesIO()
    Image.fromarray(pixels(seed, size)).save(file, "PNG")
    return file.getvalue()


def message(seed, time, size=(56, 28)):
    return struct.pack("<Bd", 1, time) + file_of(seed, size)


def raw(seed, time, size=(56, 28)):
    return struct.pack("<BdII", 2, time, *size) + pixels(seed, size).tobytes()


class Live(Session):
    def __init__(self, client, **fields):
        super().__init__(client, live={"fps": FPS, **fields.pop("live", {})}, **fields)

    @contextmanager
    def frames(self, **options):
        with self.client.websocket_connect(f"{self.url}/frames", **options) as socket:
            yield socket
            socket.close()
            deadline = time.monotonic() + 10
            while self.is_streaming():  # or else the test client cancels what is at its end
                assert time.monotonic() < deadline
                time.sleep(0.002)

    def when_pulled(self):
        """The state of live video once no stream is pulled any more."""
        deadline = time.monotonic() + 20
        while (state := self.state["live"]).get("pulled"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        return state

    def is_streaming(self):
        held = self.client.app.state.live._sessions._held.get(self.url.rpartition("/")[2])
        return held is not None and held.live is not None and held.live._running


def show(socket, *messages):
    """Send frames, and return what the server says when all whole temporal patches are in the conversation."""
    for one in messages:
        socket.send_bytes(one)
    socket.send_text('{"type": "flush"}')
    while (said := socket.receive_json())["type"] == "frames":
        pass
    assert said["type"] == "flushed", said
    return said


def failure(socket):
    """The error that ends a stream."""
    while (said := socket.receive_json())["type"] == "frames":
        pass
    return said["error"]


def videos_of(request):
    return [item.patch_digests for item in request.mm_inputs.items]


def whole(client, served, seeds, question):
    """The request of a chat with all frames."""
    urls = [f"data:image/png;base64,{base64.b64encode(file_of(seed)).decode()}" for seed in seeds]
    content = [{"type": "video", "video": urls, "sample_fps": FPS}, text(question)]
    assert client.post(CHAT, json={**BODY, "messages": [{"role": "user", "content": content}]}).status_code == 200
    return served.scheduler.requests[-1]


def test_a_question_sees_all_frames_before_it(client, served):
    session = Live(client)
    with session.frames() as socket:
        said = show(socket, *(message(seed, 5 + seed / FPS) for seed in range(4)))
        assert (said["received"], said["used"], said["done"], said["time"]) == (4, 4, 4, 1.5)
        computed = served.scheduler.requests[-1]
        assert computed.sampling_params.max_new_tokens == 0
        assert said["tokens"] == len(ids_of(computed))
        for count in (4, 5, 6):
            if count > 4:
                show(socket, message(count - 1, 5 + (count - 1) / FPS))
            session.ask("What?", keep=False)
            asked = served.scheduler.requests[-1]
            assert [len(one) for one in videos_of(asked)] == [(count + 1) // 2]
            want = whole(client, served, range(count), "What?")
            assert (ids_of(asked), videos_of(asked)) == (ids_of(want), videos_of(want))
    assert session.state["live"] == {
        "received": 6,
        "used": 6,
        "done": 6,
        "tokens": session.state["tokens"],
        "time": 2.5,
    }


def test_raw_pixels_are_those_of_files(client, served):
    for size in ((56, 28), (420, 280)):
        first, second = Live(client), Live(client)
        for session, kind in ((first, message), (second, raw)):
            with session.frames() as socket:
                show(socket, kind(1, 0.0, size), kind(2, 0.5, size))
        files, pixels_ = served.scheduler.requests[-2:]
        assert videos_of(files) == videos_of(pixels_)


def units_of(count, gop):
    """The access units of an H.264 stream that loses nothing, and whether each is a keyframe."""
    encoder = av.CodecContext.create("libx264rgb", "w")
    encoder.width, encoder.height, encoder.pix_fmt = 56, 28, "rgb24"
    encoder.framerate, encoder.time_base, encoder.gop_size = Fraction(10), Fraction(1, 10), gop
    encoder.options = {"crf": "0", "preset": "ultrafast", "bf": "0"}
    found = []
    for number in [*range(count), None]:
        picture = None
        if number is not None:
            picture = av.VideoFrame.from_ndarray(frame(number, 56, 28), format="rgb24")
            picture.pts, picture.time_base = number, Fraction(1, 10)
        found += [(bytes(packet), packet.is_keyframe) for packet in encoder.encode(picture)]
    return found


@pytest.mark.parametrize("gop", [1, 3, 7, 100])
def test_h264_gives_the_frames_that_were_encoded(client, served, gop):
    units, session, other = units_of(22, gop), Live(client), Live(client)
    with session.frames() as socket:
        show(socket, *(struct.pack("<Bd", 4 if key else 3, at / 10) + unit for at, (unit, key) in enumerate(units)))
        session.ask("What?", keep=False)
    streamed_ = served.scheduler.requests[-1]
    with other.frames() as socket:
        pictures = [struct.pack("<BdII", 2, at / 10, 56, 28) + frame(at, 56, 28).tobytes() for at in range(22)]
        show(socket, *pictures)
        other.ask("What?", keep=False)
    [patches] = videos_of(streamed_)
    assert len(patches) == 3
    assert [patches] == videos_of(served.scheduler.requests[-1])


def test_h264_begins_with_a_keyframe_and_stays_h264(client):
    units = units_of(3, 100)
    for messages, named in (
        ([struct.pack("<Bd", 3, 0.0) + units[1][0]], "begins with a key picture"),
        ([struct.pack("<Bd", 4, 0.0) + units[0][0], message(1, 0.5)], "one connection"),
        ([struct.pack("<Bd", 4, at / 2) + b"rubbish" for at in range(2)], "H.264|cannot be decoded"),
    ):
        session = Live(client)
        with session.frames() as socket:
            for one in messages:
                socket.send_bytes(one)
            assert re.search(named, failure(socket)["message"])


def test_frames_beyond_the_rate_are_left_out(client, served):
    session = Live(client)
    with session.frames() as socket:
        said = show(socket, *(message(seed, seed / 10) for seed in range(11)))
    assert (said["received"], said["used"], said["done"]) == (11, 3, 2)


def test_what_is_kept_ends_the_video(client, served):
    session = Live(client)
    with session.frames() as socket:
        show(socket, *(message(seed, seed / FPS) for seed in range(3)))
        session.ask("What?")
        said = show(socket, *(message(seed, seed / FPS) for seed in range(3, 6)))
        assert said["done"] == 5
        assert session.state["messages"] == 3
        session.ask("And?", keep=False)
    assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [2, 2]


def test_an_odd_frame_that_is_kept_is_shown_once(client, served):
    session = Live(client)
    with session.frames() as socket:
        show(socket, *(message(seed, seed / FPS) for seed in range(3)))
        served.scheduler.pause_after = 1
        asking = threading.Thread(target=session.ask, args=("What?",))
        asking.start()
        served.scheduler.wait_until(lambda: served.scheduler.requests[-1].sampling_params.max_new_tokens)
        for seed in (3, 4):
            socket.send_bytes(message(seed, seed / FPS))
        while session.state["live"]["used"] < 5:
            time.sleep(0.01)
        served.scheduler.lift_pauses = True
        asking.join()
        assert show(socket)["done"] == 5
    session.ask("And?", keep=False)
    assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [2, 1]


def live_video():
    budget = BodyBudget(ServerSettings(engine=EngineArgs(model="")))
    return LiveVideo(LiveRules(fps=FPS, depth=2, paced=False, max_pixels=10**6), budget), budget


def test_bytes_are_held_as_long_as_frames_need_them():
    live, budget = live_video()
    live.begin()
    for at, kind in enumerate((4, 3, 4, 3)):  # two groups
        live.take(kind, at / FPS, b"x" * 100)
    assert budget.held == 400, "frames of the first group wait"
    live._pop(2)
    assert budget.held == 200
    live.give_up()
    assert budget.held == 0
    for at in range(2):
        live.take(3 if at else 4, 10 + at / FPS, b"x" * 2**25)
    with pytest.raises(BadRequestError, match="the limit is"):
        live.take(3, 12.0, b"x")


def test_an_odd_frame_holds_no_room_of_frames_when_the_connection_has_ended(client, served):
    budget = client.app.state.live._budget
    session = Live(client)
    with session.frames() as socket:
        show(socket, *(message(seed, seed / FPS) for seed in range(3)))
        assert budget.held > 0
        socket.close()
        until = time.monotonic() + 5
        while budget.held and time.monotonic() < until:
            time.sleep(0.01)
        assert budget.held == 0
    session.ask("What?", keep=False)
    assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [2]


def test_text_between_frames(client, served):
    session = Live(client)
    with session.frames() as socket:
        show(socket, message(0, 0.0), message(1, 0.5))
        session.append("Now: ")
        show(socket, message(2, 1.0), message(3, 1.5))
    session.ask("What?", keep=False)
    assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [1, 1]
    assert "Now: " in served.prompt


def test_the_window(client, served):
    session = Live(client, live={"keep_seconds": 4.0})
    with session.frames() as socket:
        show(socket, *(message(seed, seed / FPS) for seed in range(40)))
        session.ask("What?", keep=False)
    asked = served.scheduler.requests[-1]
    [kept] = videos_of(asked)
    assert 3 <= len(kept) <= 5
    assert kept[-1] == videos_of(whole(client, served, (38, 39), "What?"))[0][0]


def test_a_window_that_slides_names_the_kv_of_what_stays(client, served):
    session = Live(client, live={"keep_seconds": 4.0, "window": "sliding"}, cache_salt="mine")
    with session.frames() as socket:
        for seed in range(0, 16, 2):
            show(socket, *(message(one, one / FPS) for one in (seed, seed + 1)))
        answer = session.post("ask", content="What?", keep=False, **OPTIONS).json()
    assert "window that slides" in answer["warnings"][0]
    *computed, asked = served.scheduler.requests
    before, after, *others = computed[4:]
    assert before.carried is None
    assert before.cache_salt == after.carried.cache_salt == "0 mine"
    assert asked.cache_salt == others[-1].cache_salt != "0 mine"
    assert len(videos_of(before)[0]) > len(videos_of(after)[0])
    places = after.carried.places
    assert (np.diff(places) >= 1).all()
    places = places[places < len(ids_of(before))]
    differs = np.array(ids_of(before))[places] != np.array(ids_of(after))[: len(places)]
    assert differs.argmax() > len(ids_of(after)) / 2, "the new frames are where the video ended"
    for one in others:
        if one.carried is not None:
            assert one.carried.cache_salt == after.cache_salt


def test_frames_wait_while_an_answer_is_written_that_stays(client, served):
    session = Live(client)
    with session.frames() as socket:
        show(socket, message(0, 0.0), message(1, 0.5))
        served.scheduler.pause_after = 1
        asking = threading.Thread(target=session.ask, args=("What?",))
        asking.start()
        served.scheduler.wait_until(lambda: served.scheduler.requests[-1].sampling_params.max_new_tokens)
        socket.send_bytes(message(2, 1.0))
        socket.send_bytes(message(3, 1.5))
        assert session.state["live"]["done"] == 2
        served.scheduler.lift_pauses = True
        asking.join()
        assert show(socket)["done"] == 4


@pytest.mark.parametrize(
    ("bad", "code", "named"),
    [
        (b"", "invalid_frame", "9"),
        (struct.pack("<Bd", 7, 3.0), "invalid_frame", "kind is 7"),
        (message(1, 0.25), "invalid_frame_time", "times must rise"),
        (message(1, float("nan")), "invalid_frame_time", "nan"),
        (struct.pack("<BdII", 2, 3.0, 10, 10) + b"123", "invalid_frame", "10x10"),
        (struct.pack("<BdII", 2, 3.0, 2**31, 2**31), "invalid_frame", "2147483648"),
        ("hello", "invalid_json", "JSON"),
        ('{"type": "dance"}', "invalid_value", "flush"),
        ("[" * 1025, "invalid_value", "1024"),
    ],
)
def test_bad_messages_end_the_stream_and_nothing_else(client, served, bad, code, named):
    session = Live(client)
    with session.frames() as socket:
        show(socket, message(0, 0.0), message(1, 0.5))
        (socket.send_text if isinstance(bad, str) else socket.send_bytes)(bad)
        error = failure(socket)
        assert error["code"] == code
        assert named in error["message"]
        with pytest.raises(WebSocketDisconnect) as closed:
            socket.receive_json()
        assert closed.value.code == 1008
    session.ask("What?", keep=False)
    with session.frames() as socket:  # with a clock of its own
        assert show(socket, message(2, 0.0), message(3, 0.5))["done"] == 4


@pytest.mark.parametrize(
    ("bad", "named"),
    [(struct.pack("<Bd", 1, 1.0) + b"no picture", "format"), (message(2, 1.0, (28, 28)), "28x28")],
    ids=["no picture", "another size"],
)
def test_bad_pictures_end_the_stream(client, served, bad, named):
    session = Live(client)
    with session.frames() as socket:
        show(socket, message(0, 0.0), message(1, 0.5))
        socket.send_bytes(bad)
        socket.send_bytes(message(3, 1.5, (28, 28)) if named == "28x28" else message(3, 1.5))
        assert named in failure(socket)["message"]
    assert session.state["live"]["done"] == 4, "given up"
    session.ask("What?", keep=False)
    assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [1]


def test_one_connection_at_a_time_and_its_owner(serve, tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("ann key-of-ann\nbob key-of-bob\n")
    _, client = serve(api_key_file=str(keys))
    with client:
        mine, yours = ({"Authorization": f"Bearer key-of-{name}"} for name in ("ann", "bob"))
        opened = client.post(URL, json={}, headers=mine).json()["id"]
        path = f"{URL}/{opened}/frames"
        for headers, status in (({}, 401), (yours, 404)):
            with pytest.raises(WebSocketDenialResponse) as refused_, client.websocket_connect(path, headers=headers):
                pass
            assert refused_.value.status_code == status
        with client.websocket_connect(path, headers=mine) as socket:
            with pytest.raises(WebSocketDenialResponse) as refused_, client.websocket_connect(path, headers=mine):
                pass
            assert refused_.value.status_code == 409
            client.delete(f"{URL}/{opened}", headers=mine)
            assert socket.receive_json()["error"]["code"] == "session_not_found"


def test_pages_of_others_cannot_send_frames(client):
    session = Live(client)
    with (
        pytest.raises(WebSocketDenialResponse) as refused_,
        session.frames(headers={"Origin": "https://evil.example"}),
    ):
        pass
    assert refused_.value.status_code == 403


def test_a_stream_that_stops_ends(client, served):
    session = Live(client, ttl=0.2)
    with session.frames() as socket:
        assert socket.receive_json()["error"]["code"] == "frames_timeout"


@pytest.mark.parametrize("url", ["http://localhost/x", "rtsp://./x", "http://../x"])
def test_no_host_is_allowed_without_the_setting(client, url):
    answer = Live(client).post("pull", url=url)
    assert answer.status_code == 403, answer.text
    assert "--allowed-live-hosts" in answer.json()["error"]["message"]


@pytest.mark.slow
def test_the_server_pulls_from_hosts_that_are_allowed(serve, tmp_path):
    """A file behind HTTP stands for a camera: it comes as fast as it is read."""
    (tmp_path / "clip.ts").write_bytes(make_clip(40, codec="libx264", container="mpegts"))
    (tmp_path / "text.ts").write_bytes(b"no video")
    handler = partial(SimpleHTTPRequestHandler, directory=str(tmp_path))
    served, client = serve(allowed_live_hosts="127.0.0.1", max_live_pulls=1)
    with client, ThreadingHTTPServer(("127.0.0.1", 0), handler) as camera:
        threading.Thread(target=camera.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{camera.server_port}/clip.ts"
        session = Live(client)
        for bad, status, named in (
            ("http://localhost/clip.ts", 403, "--allowed-live-hosts"),
            ("file:///etc/passwd", 400, "rtsp://"),
            (url.replace("clip", "none"), 400, "404"),
            (url.replace("clip", "text"), 400, "opened"),
        ):
            answer = session.post("pull", url=bad)
            assert answer.status_code == status, answer.text
            assert named in answer.json()["error"]["message"]
        assert session.post("pull", url=url).status_code == 200
        state = session.when_pulled()
        assert (state["used"], state["time"]) == (8, 3.5)
        assert "it has ended" in state["error"]
        session.ask("What?", keep=False)
        assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [4]
        camera.shutdown()


@pytest.mark.slow
def test_the_server_pulls_rtsp(serve):
    served, client = serve(allowed_live_hosts="127.0.0.1")
    with client, camera(40, fps=10) as source:
        session = Live(client)
        assert session.post("pull", url=source.url).status_code == 200
        state = session.when_pulled()
        assert (state["used"], state["time"]) == (8, 3.5)
        assert "it has ended" in state["error"]
        assert source.asked[:4] == ["OPTIONS", "DESCRIBE", "SETUP", "PLAY"]
        session.ask("What?", keep=False)
        assert [len(one) for one in videos_of(served.scheduler.requests[-1])] == [4]


def test_memory_is_bounded(serve):
    _, client = serve(max_open_session_bytes=20_000)
    with client:
        session = Live(client)
        with session.frames() as socket:
            for seed in range(20):
                socket.send_bytes(message(seed, seed / FPS))
            assert failure(socket)["code"] == "sessions_full"
        assert session.state["bytes"] <= 20_000
        assert session.ask("What?", keep=False)


def events_of(answer):
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n") if line.startswith("data: {")]


def test_a_standing_question(client, served):
    session = Live(client)
    with session.frames() as socket:
        show(socket, message(0, 0.0), message(1, 0.5))
        found = []
        asked = {"content": "Is it there?", "every": 0.1, "max_answers": 2, **OPTIONS}
        asking = threading.Thread(target=lambda: found.append(session.post("standing", **asked)))
        asking.start()
        served.scheduler.wait_until(
            lambda: any(one.sampling_params.max_new_tokens for one in served.scheduler.requests)
        )
        show(socket, message(2, 1.0), message(3, 1.5))
        asking.join()
    first, second = events_of(found[0])
    assert (first["number"], first["time"]) == (1, 0.5)
    assert (second["number"], second["time"]) == (2, 1.5)
    assert second["answer"]["choices"][0]["message"]["content"]
    assert found[0].text.endswith("data: [DONE]\n\n")
    assert session.state["messages"] == 1


def test_standing_questions_are_checked(client):
    session = Live(client, ttl=0.3)
    for fields, named in (({}, "every"), ({"every": 0}, "every"), ({"every": 1, "keep": True}, "keep")):
        answer = session.post("standing", content="What?", **fields)
        assert answer.status_code == 400
        assert named in answer.json()["error"]["message"]
    quiet = session.post("standing", content="What?", every=0.1)
    assert events_of(quiet) == [], "nothing is there to be asked about, and then its time is over"
