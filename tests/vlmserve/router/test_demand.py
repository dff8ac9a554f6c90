"""What a body asks of a server, as far as the router sees it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vlmserve.router.demand import wish_of
from vlmserve.routing.replicas import Demand

LONG, SHORT = "word " * 400, "word " * 40


def demand(**body: Any) -> Demand:
    return wish_of(json.dumps(body).encode(), "", "rid").demand


@pytest.mark.parametrize("field", ["input", "texts", "documents", "text_2"])
def test_lists_of_texts_are_counted(field: str) -> None:
    one, two = demand(**{field: [LONG]}), demand(**{field: [LONG, LONG]})
    assert 0 < one.tokens <= two.tokens // 2
    assert two.prefix[: len(one.prefix)] == one.prefix
    assert demand(**{field: [SHORT, LONG]}).prefix != one.prefix


def test_pictures_in_inputs_are_media() -> None:
    inputs = [{"content": [{"type": "image_url", "image_url": {"url": "https://example.com/a.png"}}]}]
    assert demand(inputs=inputs).media == demand(messages=inputs).media != ()
