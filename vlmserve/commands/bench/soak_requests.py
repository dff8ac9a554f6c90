"""The requests of a soak, by seed and number, and the clients that send them and leave some of them."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import httpx2

from vlmserve.commands.bench.media import clip, draw_picture, picture_part
from vlmserve.commands.client.media import data_url

PATIENCE_S = 120.0
_PIECE = 4096  # bytes of a body
CHAT, SCORE, FILES = "/v1/chat/completions", "/v1/score", "/v1/files"
SESSIONS = 64
_REPEATED = 8  # pictures that come again and again
_SIDES = (64, 96, 128, 160, 224)
_WORDS = ("red", "a", "circle", "left", "of", "two", "small", "squares", "and", "the", "number", "under", "it")
_LONG_WORDS = 900  # some 1000 tokens: several chunks of a prompt
_TOO_LONG_WORDS = 20_000
_FORM = "multipart/form-data; boundary=soak"
Body: TypeAlias = dict[str, Any]


class Cut(NamedTuple):
    """The place where a client leaves, and how far it gets.

    `far` is the part of the body that is sent, of 1; or seconds since the client began to send; or the events read.
    """

    where: Literal["in its body", "waiting", "in its stream"]
    far: float


@dataclass(frozen=True, kw_only=True, slots=True)
class SoakRequest:
    """A POST request. statuses: the right ones. cut: None if the client stays to the end."""

    number: int
    kind: str
    path: str = CHAT
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)
    statuses: Sequence[int] = (200,)
    cut: Cut | None = None


class Mix:
    """All requests of a soak. cut_off: part of the requests that clients leave, of 1. model: its name at the server."""

    def __init__(self, model: str, *, seed: int, cut_off: float) -> None:
        self._model, self._seed, self._cut_off = model, seed, cut_off
        self._pictures = [draw_picture(_SIDES[at % len(_SIDES)], [seed, at]) for at in range(_REPEATED)]
        self._clips = [clip(side, 64, seconds=1, rate=10) for side in (64, 96, 128)]

    def request(self, number: int) -> SoakRequest:
        """Return the request of a number, 0 and up."""
        dice = random.Random(f"{self._seed}-{number}")
        kind = dice.choices(list(_KINDS), [weight for weight, _ in _KINDS.values()])[0]
        made = _KINDS[kind][1](self, dice, number)
        # another client each time: what the server keeps of clients must not grow either
        address = ".".join(["10", *(str(dice.randrange(256)) for _ in range(3))])
        headers = {"Content-Type": made.pop("type", "application/json"), "X-Forwarded-For": address}
        cut, body = None, made.pop("body")
        if dice.random() < self._cut_off:
            cut = _cut(dice, streams=isinstance(body, dict) and made.get("path", CHAT) == CHAT)
            if isinstance(body, dict) and "messages" in body:  # so long that no client has the whole answer before
                body |= {
                    "max_tokens": 300,
                    "ignore_eos": True,
                    "stream": cut.where == "in its stream" or dice.random() < 0.5,
                }
        content = json.dumps(body).encode() if isinstance(body, dict) else body
        return SoakRequest(number=number, kind=kind, body=content, headers=headers, cut=cut, **made)

    def _chat(self, dice: random.Random, *parts: object, words: int = 12, **fields: object) -> dict[str, Any]:
        text = " ".join(dice.choices(_WORDS, k=words))
        body: Body = {
            "model": self._model,
            "messages": [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}],
            "max_tokens": dice.randint(1, 24),
            "temperature": dice.choice((0, 1)),
            "stream": dice.random() < 0.5,
        }
        if dice.random() < 0.1:
            body |= {"logprobs": True, "top_logprobs": 3}
        if dice.random() < 0.1:
            body |= {"stop": ["circle", "square"]}
        return {"body": body | fields}

    def _new_picture(self, dice: random.Random, number: int, place: int = 0) -> bytes:
        return draw_picture(dice.choice(_SIDES), [self._seed, _REPEATED + number, place])

    def text(self, dice: random.Random, _: int) -> dict[str, Any]:
        return self._chat(dice)

    def same_picture(self, dice: random.Random, _: int) -> dict[str, Any]:
        return self._chat(dice, picture_part(dice.choice(self._pictures)))

    def new_picture(self, dice: random.Random, number: int) -> dict[str, Any]:
        return self._chat(dice, picture_part(self._new_picture(dice, number)))

    def pictures(self, dice: random.Random, number: int) -> dict[str, Any]:
        new = [picture_part(self._new_picture(dice, number, place)) for place in range(2)]
        return self._chat(dice, *new, picture_part(dice.choice(self._pictures)))

    def video(self, dice: random.Random, _: int) -> dict[str, Any]:
        return self._chat(dice, {"type": "video_url", "video_url": {"url": data_url(dice.choice(self._clips))}})

    def frames(self, dice: random.Random, number: int) -> dict[str, Any]:
        frames = [data_url(draw_picture(64, [self._seed, _REPEATED + number, place])) for place in range(4)]
        return self._chat(dice, {"type": "video", "video": frames})

    def choices(self, dice: random.Random, number: int) -> dict[str, Any]:
        parts = [picture_part(self._new_picture(dice, number))] if dice.random() < 0.5 else []
        return self._chat(dice, *parts, n=dice.randint(2, 4))

    def long(self, dice: random.Random, _: int) -> dict[str, Any]:
        return self._chat(dice, words=_LONG_WORDS)

    def session(self, dice: random.Random, _: int) -> dict[str, Any]:
        return self._chat(dice, session_id=f"session {dice.randrange(SESSIONS)}")

    def salted(self, dice: random.Random, number: int) -> dict[str, Any]:
        return self._chat(dice, cache_salt=f"tenant {number}")

    def in_time(self, dice: random.Random, _: int) -> dict[str, Any]:
        fields: Body = {"timeout": dice.uniform(0.01, 0.3), "max_tokens": 300, "ignore_eos": True}
        # a stream that has begun says so in itself
        return self._chat(dice, **fields) | {"statuses": (200, 504)}

    def score(self, dice: random.Random, number: int) -> dict[str, Any]:
        query = self._chat(dice, picture_part(self._new_picture(dice, number)))["body"]["messages"]
        body = {"model": self._model, "query": query, "labels": ["yes", "no", "a circle"], "apply_softmax": True}
        return {"path": SCORE, "body": body}

    def file(self, dice: random.Random, number: int) -> dict[str, Any]:
        parts = b'--soak\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
        picture = parts % (b"file", b'; filename="new.png"', self._new_picture(dice, number))
        body = parts % (b"purpose", b"", b"vision") + picture + b"--soak--\r\n"
        return {"path": FILES, "body": body, "type": _FORM}

    def wrong(self, dice: random.Random, number: int) -> dict[str, Any]:
        picture = self._pictures[0]
        broken: list[dict[str, Any]] = [
            {"body": b'{"model": "' + str(number).encode()},
            self._chat(dice, temperature=9),
            self._chat(dice, model=f"other {number}"),
            self._chat(dice, words=_TOO_LONG_WORDS),
            self._chat(dice, picture_part(picture[: dice.randrange(10, len(picture))])),
            self._chat(dice, {"type": "image_url", "image_url": {"url": f"http://127.0.0.1:1/{number}.png"}}),
            self._chat(dice, {"type": "video_url", "video_url": {"url": data_url(self._clips[0][:600])}}),
            self._chat(dice, {"type": "file", "file": {"file_id": f"file-{number}"}}),
        ]
        return dice.choice(broken) | {"statuses": range(400, 500)}


_KINDS: dict[str, tuple[int, Callable[[Mix, random.Random, int], dict[str, Any]]]] = {
    "text": (28, Mix.text),
    "a picture that came before": (14, Mix.same_picture),
    "a new picture": (18, Mix.new_picture),
    "three pictures": (4, Mix.pictures),
    "a video": (2, Mix.video),
    "frames": (2, Mix.frames),
    "several answers": (6, Mix.choices),
    "a long prompt": (4, Mix.long),
    "a session": (6, Mix.session),
    "a cache salt": (3, Mix.salted),
    "a time limit": (2, Mix.in_time),
    "a score": (2, Mix.score),
    "an upload": (2, Mix.file),
    "a wrong request": (7, Mix.wrong),
}


def _cut(dice: random.Random, *, streams: bool) -> Cut:
    where = dice.random()
    if where < 0.2:
        return Cut("in its body", dice.random())
    if where < 0.6 or not streams:
        return Cut("waiting", dice.uniform(0, 0.3))
    return Cut("in its stream", dice.randint(1, 40))


class SoakClients:
    """Clients that send the requests of a mix to a server, `at_a_time` at a time.

    outcomes: requests by kind and outcome. wrong: the first answers that should not have come.
    """

    def __init__(self, url: str, request: Callable[[int], SoakRequest], *, at_a_time: int) -> None:
        self._url, self._request, self._at_a_time = url, request, at_a_time
        self.outcomes: Counter[tuple[str, str]] = Counter()
        self.wrong: list[str] = []

    @property
    def cut_off(self) -> int:
        """The number of requests whose clients left before they had the whole answer."""
        return sum(count for (_, outcome), count in self.outcomes.items() if outcome.startswith("cut off"))

    async def run(self, numbers: range) -> None:
        """Send the requests of these numbers, and return when all have ended and all connections are closed."""
        left = iter(numbers)
        limits = httpx2.Limits(max_connections=None, max_keepalive_connections=self._at_a_time)
        async with httpx2.AsyncClient(base_url=self._url, timeout=None, limits=limits, trust_env=False) as http:

            async def client() -> None:
                for number in left:
                    await self._one(http, self._request(number))

            async with asyncio.TaskGroup() as group:
                for _ in range(self._at_a_time):
                    group.create_task(client())

    async def _one(self, http: httpx2.AsyncClient, request: SoakRequest) -> None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                outcome = await _ask(http, request)
        except TimeoutError:
            outcome = f"no answer in {PATIENCE_S:g} s"
        except httpx2.HTTPError as error:
            outcome = f"{type(error).__name__}: {error}"
        self.outcomes[request.kind, outcome.partition(": ")[0]] += 1
        right = outcome.startswith("cut off") or outcome in map(str, request.statuses)
        if not right and len(self.wrong) < 20:
            self.wrong.append(f"request {request.number}, {request.kind}: {outcome}")


class _LeftError(Exception):
    """The client left."""


async def _ask(http: httpx2.AsyncClient, request: SoakRequest) -> str:
    """Return the status of the answer, with its text if it is wrong; or where the client left."""
    cut = request.cut
    try:
        async with asyncio.timeout(cut.far if cut and cut.where == "waiting" else None):
            return await _answer(http, request)
    except (TimeoutError, _LeftError):
        if cut is None:
            raise
        return f"cut off {cut.where}"


async def _answer(http: httpx2.AsyncClient, request: SoakRequest) -> str:
    headers = {**request.headers, "Content-Length": str(len(request.body))}
    async with http.stream("POST", request.path, content=_body(request), headers=headers) as response:
        cut = request.cut
        if cut and cut.where == "in its stream" and response.status_code == 200:
            events = 0
            async for line in response.aiter_lines():
                events += line.startswith("data:")
                if events >= cut.far:
                    raise _LeftError
        content = await response.aread() if not response.is_stream_consumed else b""
        status = response.status_code
    if request.path == FILES and status == 200:
        name = response.json()["id"]
        deleted = await http.delete(f"{FILES}/{name}", headers=dict(request.headers))
        return str(deleted.status_code)
    return str(status) if status in request.statuses else f"{status}: {content[:300].decode(errors='replace')}"


async def _body(request: SoakRequest) -> AsyncIterator[bytes]:
    """Yield the body in pieces, up to where the client leaves."""
    leaves = request.cut is not None and request.cut.where == "in its body"
    sent = request.body[: int(len(request.body) * request.cut.far)] if request.cut and leaves else request.body
    for at in range(0, len(sent), _PIECE):
        yield sent[at : at + _PIECE]
    if leaves:
        raise _LeftError
