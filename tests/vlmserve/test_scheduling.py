"""Sessions, salts and priorities through a whole server, and tiers of the prefix cache through `LLM`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from tests.vlmserve.server_process import ServerProcess, serving
from vlmserve import LLM, SamplingOverrides

QUESTION = "What is the colour of the sky on a day like this one, and of the sea below it?"
GREEDY = SamplingOverrides(max_new_tokens=12, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def client(shared_server: ServerProcess) -> Iterator[openai.OpenAI]:
    with shared_server.client() as client:
        yield client


def ask(client: openai.OpenAI, turns: list[str], **more: Any) -> tuple[str, int]:
    """The answer, and how many tokens of the prompt were cached."""
    roles = ("user", "assistant")
    messages = [{"role": roles[number % 2], "content": text} for number, text in enumerate(turns)]
    answer = client.chat.completions.create(
        model="tiny", messages=messages, max_tokens=12, temperature=0, extra_body={"ignore_eos": True, **more}
    )
    return answer.choices[0].message.content, answer.usage.prompt_tokens_details.cached_tokens


def test_a_session_goes_on_where_it_was(client):
    first, _ = ask(client, [QUESTION], session_id="s")
    again, cached = ask(client, [QUESTION, first, "And now?"], session_id="s")
    assert cached >= 16
    assert again == ask(client, [QUESTION, first, "And now?"], cache_salt="fresh")[0]


def test_requests_with_other_salts_share_nothing(client):
    answers = [ask(client, [QUESTION], cache_salt=salt) for salt in ("a", "a", "b")]
    assert [cached > 0 for _, cached in answers] == [False, True, False]
    assert len({text for text, _ in answers}) == 1


def test_prefixes_come_back_from_the_host_and_after_a_restart_from_disk(tmp_path):
    prompts = [f"{i} " + " ".join(str(i * j) for j in range(120)) for i in range(1, 6)]
    settings: dict[str, Any] = {"num_threads": 1, "media_processes": 0}
    with LLM(**settings, disable_radix_cache=True) as llm:
        wanted = [llm.generate([prompt], GREEDY)[0].token_ids for prompt in prompts]
    tiers: dict[str, Any] = {"enable_hierarchical_cache": True, "max_total_tokens": 1024}
    cached = []
    # room for all on the host, and for one, so that others go to disk; what is there at the end goes there, too
    for gib, folder in ((0.01, "a"), (0.001, "b"), (0.001, "b"), (0.01, "a")):
        tiers["hicache_storage_dir"] = str(tmp_path / folder)
        with LLM(**settings, **tiers, hicache_size_gib=gib) as llm:
            for _ in range(2):
                answers = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
                assert [answer.token_ids for answer in answers] == wanted
                cached.append(sum(answer.cached_tokens > 300 for answer in answers))
    assert cached[0] == cached[2] == 0
    assert cached[1] == 5
    assert cached[3] >= 1  # how many more depends on how fast the disk is; the restart below finds all
    assert cached[4] == cached[6] == 5


@pytest.mark.slow
def test_a_server_goes_on_with_the_prefixes_of_the_one_before(tmp_path):
    flags = ["--enable-hierarchical-cache", "--hicache-size-gib=0.01", f"--hicache-storage-dir={tmp_path / 'kv'}"]
    prompt = " ".join(str(7 * i) for i in range(100))
    found = []
    for _ in range(2):
        with serving(tmp_path / "run", *flags) as server:
            with server.client() as client:
                found.append(ask(client, [prompt]))
            server.process.send_signal(signal.SIGTERM)
            assert server.wait() == 0
            assert "lost" not in "".join(server.log)
    assert found[0][0] == found[1][0]
    assert found[0][1] == 0
    assert found[1][1] > 370, "all but its end"
