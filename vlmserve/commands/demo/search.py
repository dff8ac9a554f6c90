"""Pictures found by a sentence: a served embedder makes vectors of both, and the nearest pictures are the best ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from processors.formats import HEAD_BYTES, modality_of
from processors.image.decoding import DecodeLimits, decode_image
from processors.inputs import Modality
from vlmserve.commands.client.chat_client import ChatClient, ServerError
from vlmserve.commands.client.media import data_url
from vlmserve.commands.demo import panels
from vlmserve.commands.demo.chat import in_the_pages_words
from vlmserve.commands.demo.pictures import Question
from vlmserve_common.errors import BadRequestError

BEST = 12
MOST = 5000
"""Pictures of one folder. Each takes about 30 kB of the page's memory."""
_AT_A_TIME = 8
_SIDE = 320  # of a thumbnail, in pixels
_INSTRUCTION = "Retrieve images or text relevant to the user's query."


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A picture of a folder. vector: float32 [dimensions], of length 1. shown: a small one, as a data: URL."""

    name: str
    vector: np.ndarray
    shown: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Album:
    """The pictures of a folder so far. given: the number of its files. problems: a sentence for each that failed."""

    given: int = 0
    pictures: tuple[Picture, ...] = ()
    problems: tuple[str, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether every file is done."""
        return len(self.pictures) + len(self.problems) == self.given

    def nearest(self, vector: np.ndarray) -> list[tuple[Picture, float]]:
        """Return the best pictures for a vector of a sentence, with the cosine of the angle between them."""
        if not self.pictures:
            return []
        scores = np.stack([one.vector for one in self.pictures]) @ vector
        return [(self.pictures[at], float(scores[at])) for at in np.argsort(-scores, kind="stable")[:BEST]]


class Search:
    """Has a server make vectors. It holds no pictures: the page has them."""

    def __init__(self, client: ChatClient, model: str) -> None:
        self._client, self.model = client, model

    @classmethod
    async def at(cls, client: ChatClient, model: str) -> Self | str:
        """Return a search by a served model. If that makes no vectors, return what the server says of it."""
        search = cls(client, model)
        try:
            await search.vector_of("a")
        except ServerError as error:
            return str(error)
        return search

    async def vector_of(self, sentence: str) -> np.ndarray:
        """Return the vector of a sentence. Raises ServerError."""
        asked = [{"role": "system", "content": _INSTRUCTION}, {"role": "user", "content": sentence}]
        return await self._client.embed(self.model, asked)

    async def look_at(self, files: Sequence[Path]) -> AsyncGenerator[Album, None]:
        """Yield what is there of a folder after each lot of pictures, in the order of the files."""
        album = Album(given=min(len(files), MOST))
        yield album
        for start in range(0, album.given, _AT_A_TIME):
            lot = await asyncio.gather(*map(self._picture, files[start : min(start + _AT_A_TIME, album.given)]))
            album = Album(
                given=album.given,
                pictures=(*album.pictures, *(one for one in lot if isinstance(one, Picture))),
                problems=(*album.problems, *(one for one in lot if isinstance(one, str))),
            )
            yield album

    async def _picture(self, path: Path) -> Picture | str:
        """Return a picture of the folder, or a sentence that says why there is none."""
        try:
            url, shown = await asyncio.to_thread(_read, path)
            part = {"type": "image_url", "image_url": {"url": url}}
            vector = await self._client.embed(self.model, [{"role": "user", "content": [part]}])
        except (BadRequestError, ServerError, OSError) as error:
            told = in_the_pages_words(str(error), [Question(text="", media=(path,))])
            return told if path.name in told else f"{path.name}: {told}"
        return Picture(name=path.name, vector=vector, shown=shown)


def _read(path: Path) -> tuple[str, str]:
    """Return a picture, and a small one, as data: URLs. Raises BadRequestError and OSError."""
    data = path.read_bytes()
    if modality_of(data[:HEAD_BYTES]) is not Modality.IMAGE:
        raise BadRequestError("this is no picture")
    image = decode_image(data, DecodeLimits())
    image.thumbnail((_SIDE, _SIDE))
    return data_url(data), panels.data_url(image)
