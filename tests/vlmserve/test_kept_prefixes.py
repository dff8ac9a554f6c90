"""A server's prefixes outlive it where there is a folder for them."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.vlmserve.server_process import serving

PROMPT = " ".join(str(7 * i) for i in range(100))


@pytest.mark.slow
def test_a_server_goes_on_with_the_prefixes_of_the_one_before(tmp_path: Path) -> None:
    flags = ["--enable-hierarchical-cache", "--hicache-size-gib=0.01", f"--hicache-storage-dir={tmp_path / 'kv'}"]
    answers, cached = [], []
    for _ in range(2):
        with serving(tmp_path / "run", *flags) as server:
            with server.client() as client:
                answer = client.chat.completions.create(
                    model="tiny", messages=[{"role": "user", "content": PROMPT}], max_tokens=8, temperature=0
                )
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            assert "lost" not in "".join(server.log)
        answers.append(answer.choices[0].message.content)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        cached.append((answer.usage.prompt_tokens_details.cached_tokens, answer.usage.prompt_tokens))
    assert answers[0] == answers[1]
    assert cached[0][0] == 0
    assert cached[1][0] > cached[1][1] - 20
