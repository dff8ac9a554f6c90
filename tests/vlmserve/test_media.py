"""A request's media on their way to the pool."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from processors.fetch.fetching import MediaFetcher
from processors.fetch.limits import FetchSettings
from processors.pool.pool import PoolSettings, ProcessorPool
from tests import hf_env  # noqa: F401
from tests.processors.helpers import tiny_processor
from vlmserve.frontend.chat_messages import ImageRef
from vlmserve.frontend.media import RequestMedia
from vlmserve_common.errors import BadRequestError


@pytest.fixture
def media(tmp_path):
    processor = tiny_processor(tmp_path, "qwen2_vl")
    media = RequestMedia(processor, ProcessorPool(processor, MediaFetcher(FetchSettings()), PoolSettings()))
    yield media
    asyncio.run(media.close())


@pytest.mark.parametrize(
    ("name", "why"), [("gone", "No such file"), ("", "directory"), ("a\0b", "null byte"), ("a\ud800", "surrogates")]
)
def test_a_path_that_cannot_be_read_is_the_requests_fault(media, tmp_path, name, why):
    with pytest.raises(BadRequestError, match=f"^cannot read .*{why}") as caught:
        asyncio.run(media.load([ImageRef(source=Path(tmp_path, name), param="here")]))
    assert caught.value.param == "here"
    caught.value.message.encode()  # can be printed
