"""What stands at the page's address before the page does."""

from __future__ import annotations

import re
from contextlib import closing

import httpx2
import pytest

from vlmserve.api.listening import listen
from vlmserve.commands.demo.waiting import WaitingPage


def test_it_says_what_is_being_done_and_makes_room() -> None:
    listener = listen("127.0.0.1", 0)
    port = listener.getsockname()[1]
    url = f"http://127.0.0.1:{port}/"
    with WaitingPage(listener, "Starting <it> ...") as waiting:
        first = httpx2.get(url)
        assert first.status_code == 503
        assert re.search(r"Starting &lt;it&gt; \.\.\. \(\d+ s so far\)", first.text)
        waiting.doing = "Loading"
        assert re.search(r"Loading \(\d+ s so far\)", httpx2.get(url + "any/path").text)
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)
    with closing(listen("127.0.0.1", port)) as again:  # as who comes next does
        again.listen()
