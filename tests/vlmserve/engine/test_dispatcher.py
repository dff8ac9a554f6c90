"""One handler for each type, and a clear word about others."""

from __future__ import annotations

import pytest

from vlmserve.engine.dispatcher import TypeDispatcher
from vlmserve_common.errors import EngineError


class Special(int):
    """Not exactly an int."""


def test_the_handler_of_the_type_is_called() -> None:
    dispatch = TypeDispatcher({int: lambda n: n + 1, str: str.upper}, covers=(int, str))
    assert dispatch(1) == 2
    assert dispatch("a") == "A"


def test_an_unknown_type_is_named() -> None:
    dispatch = TypeDispatcher({int: abs, str: len})
    with pytest.raises(EngineError, match="no handler for a message of type Special; there are some for int, str"):
        dispatch(Special(1))


def test_what_is_not_covered_is_told_at_the_start() -> None:
    with pytest.raises(EngineError, match="no handler for messages of type float, str"):
        TypeDispatcher({int: abs}, covers=(int, str, float))
