"""A camera that speaks RTSP: FFmpeg makes RTP of the frames of `clips.frame`, and this sends it to the client, inside
the connection of RTSP."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import struct
import threading
from collections.abc import Iterator

import av
from av.video.frame import VideoFrame

from tests.processors.clips import frame

_SDP = "\r\n".join(
    (
        *("v=0", "o=- 0 0 IN IP4 127.0.0.1", "s=camera", "c=IN IP4 0.0.0.0", "t=0 0", "m=video 0 RTP/AVP 96"),
        *("a=rtpmap:96 H264/90000", "a=fmtp:96 packetization-mode=1", "a=control:video", ""),
    )
)
_OPTIONS = {"preset": "ultrafast", "tune": "zerolatency", "g": "5"}


class Camera(socketserver.ThreadingTCPServer):
    """frames: how many it shows, `fps` a second. asked: the methods of its client."""

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, frames: int, fps: int) -> None:
        super().__init__(("127.0.0.1", 0), _Client)
        self.frames, self.fps = frames, fps
        self.asked: list[str] = []

    @property
    def url(self) -> str:
        return f"rtsp://127.0.0.1:{self.server_address[1]}/camera"


class _Client(socketserver.StreamRequestHandler):
    server: Camera

    def handle(self) -> None:
        while start := self.rfile.read(1):
            if start == b"$":  # RTCP
                _, size = struct.unpack(">BH", self.rfile.read(3))
                self.rfile.read(size)
                continue
            method, url, _ = (start + self.rfile.readline()).decode().split()
            headers = {}
            while line := self.rfile.readline().strip().decode():
                name, _, value = line.partition(":")
                headers[name.lower()] = value.strip()
            self.server.asked.append(method)
            self._answer(method, url, headers["cseq"])
            if method == "PLAY":
                threading.Thread(target=self._play).start()

    def _answer(self, method: str, url: str, number: str) -> None:
        more, body = "", ""
        if method == "OPTIONS":
            more = "Public: OPTIONS, DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
        elif method == "DESCRIBE":
            body = _SDP
            more = f"Content-Base: {url}/\r\nContent-Type: application/sdp\r\nContent-Length: {len(body)}\r\n"
        elif method == "SETUP":
            more = "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\nSession: 1\r\n"
        self.wfile.write(f"RTSP/1.0 200 OK\r\nCSeq: {number}\r\n{more}\r\n{body}".encode())

    def _play(self) -> None:
        with contextlib.ExitStack() as stack:
            packets, reports = (stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) for _ in "12")
            for one in (packets, reports):
                one.bind(("127.0.0.1", 0))
                one.setblocking(False)
            port, other = packets.getsockname()[1], reports.getsockname()[1]
            url = f"rtp://127.0.0.1:{port}?rtcpport={other}&pkt_size=1200"
            box = stack.enter_context(av.open(url, "w", format="rtp"))
            stream = box.add_stream("libx264", rate=self.server.fps, options=_OPTIONS)
            stream.width, stream.height, stream.pix_fmt = 112, 84, "yuv420p"
            for number in range(self.server.frames + 1):
                last = number == self.server.frames
                picture = None if last else VideoFrame.from_ndarray(frame(number, 112, 84), format="rgb24")
                box.mux(stream.encode(picture))
                with contextlib.suppress(BlockingIOError):
                    while packet := packets.recv(2048):
                        self.wfile.write(struct.pack(">cBH", b"$", 0, len(packet)) + packet)
        self.connection.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def camera(frames: int, fps: int) -> Iterator[Camera]:
    """Run a camera for the time of a block."""
    with Camera(frames, fps) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()
