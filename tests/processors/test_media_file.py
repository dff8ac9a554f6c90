"""Files of the server's own in the pool: as pictures and videos."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from processors.fetch.fetching import MediaFetcher, MediaFile
from processors.fetch.limits import ByteLimit, FetchSettings
from processors.pool.pool import PoolSettings, ProcessorPool
from processors.pool.requests import ImageRequest, VideoRequest
from tests import hf_env  # noqa: F401
from tests.processors.clips import make_clip
from tests.processors.helpers import encoded, picture, tiny_processor
from vlmserve_common.errors import BadRequestError


class File(MediaFile):
    """Notes the limits it is read with."""

    modality = None

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.limits: list[ByteLimit] = []

    def read(self, limit: ByteLimit) -> bytes:
        self.limits.append(limit)
        return self.data


class Gone(MediaFile):
    modality = None

    def read(self, limit: ByteLimit) -> bytes:
        raise BadRequestError("there is no file", code="file_not_found", status=404)


@pytest.fixture
def pool(tmp_path):
    fetcher = MediaFetcher(FetchSettings(max_bytes=100_000, max_video_bytes=200_000))
    pool = ProcessorPool(tiny_processor(tmp_path, "qwen2_vl"), fetcher, PoolSettings(max_workers=1))
    yield pool
    asyncio.run(pool.close())


def test_a_file_is_what_its_bytes_are(pool):
    png, clip = encoded(picture(56, 84)), make_clip(4, width=56, height=56)
    image, video = File(png), File(clip)
    got = asyncio.run(pool.load([ImageRequest(source=image), VideoRequest(source=video)]))
    want = asyncio.run(pool.load([ImageRequest(source=png), VideoRequest(source=clip)]))
    for one, other in zip(got, want, strict=True):
        assert one.digest == other.digest
        assert np.array_equal(one.feature, other.feature)
    assert image.limits == [ByteLimit(bytes=100_000, setting="--media-max-bytes")]
    assert video.limits == [ByteLimit(bytes=200_000, setting="--max-video-bytes")]


@pytest.mark.parametrize("kind", [ImageRequest, VideoRequest])
def test_a_file_that_is_gone_names_the_request_field(pool, kind):
    with pytest.raises(BadRequestError, match="there is no file") as caught:
        asyncio.run(pool.load([kind(source=Gone(), param="messages[0].content[1]")]))
    assert (caught.value.param, caught.value.status) == ("messages[0].content[1]", 404)
