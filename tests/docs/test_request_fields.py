"""The table of request fields in docs/flags-of-others.md is what the server takes."""

from __future__ import annotations

import re

from tests.vlmserve.server_process import ROOT
from vlmserve.frontend.openai.protocol import ChatCompletionRequest, FormedRequest, SampledRequest

FIELDS = set(ChatCompletionRequest.model_fields)
PAGE = (ROOT / "docs" / "flags-of-others.md").read_text(encoding="utf-8")
ROWS = [
    [set(re.findall(r"`([a-z_]+)`", cell)) for cell in line.split("|")[1:4]]
    for line in PAGE.partition("## Fields of requests")[2].splitlines()
    if line.startswith("| ")
][1:]


def test_what_is_said_to_be_there_is() -> None:
    assert len(ROWS) > 10
    assert set().union(*(here for _, _, here in ROWS)) <= FIELDS


def test_what_is_said_to_be_refused_is_not_there() -> None:
    refused = set(re.findall(r"`([a-z_]+)`", PAGE.partition("Refused:")[2].partition("A prompt")[0]))
    assert len(refused) > 20
    assert not refused & FIELDS


def test_all_that_is_not_openai_s_is_in_the_table() -> None:
    names, shared = list(ChatCompletionRequest.model_fields), list(SampledRequest.model_fields)
    extensions = {*shared[shared.index("user") + 1 :], *names[names.index("function_call") + 1 :]}
    ours = (extensions | set(FormedRequest.model_fields)) - {"response_format", "messages"}  # OpenAI's, too
    assert ours - set().union(*(here for _, _, here in ROWS)) == set()
