"""What is not to be tried again is remembered, and nothing else of it."""

from __future__ import annotations

import weakref

import pytest

from processors.pool.fatal_media import FatalMedia
from processors.pool.maker import FatalMediumError


class Bytes:
    """Something that can be asked whether it is still there."""


def failure() -> tuple[FatalMediumError, weakref.ref]:
    """An error, whose traceback holds `data`."""
    data = Bytes()
    try:
        raise FatalMediumError("it crashed", code="media_crash")
    except FatalMediumError as error:
        return error, weakref.ref(data)


def test_an_error_is_remembered_without_the_medium():
    fatal = FatalMedia()
    error, data = failure()
    fatal.add(b"key", error)
    assert data() is not None
    del error
    assert data() is None
    fatal.check(b"other")
    with pytest.raises(FatalMediumError, match=r"^it crashed; it is not tried again$") as caught:
        fatal.check(b"key")
    assert (caught.value.code, caught.value.status) == ("media_crash", 400)


def test_the_oldest_are_forgotten():
    fatal = FatalMedia(max_entries=2)
    for number in range(3):
        fatal.add(bytes([number]), FatalMediumError(str(number)))
    fatal.check(bytes([0]))
    for number in (1, 2):
        with pytest.raises(FatalMediumError, match=str(number)):
            fatal.check(bytes([number]))
