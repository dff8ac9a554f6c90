"""Through HTTP, the three processes and the `openai` client: every family answers as `transformers` does."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.processors.helpers import encoded
from tests.tiny_checkpoints import ALL_FAMILIES, HYBRIDS, STREAMED, make_checkpoint
from tests.vlmserve.reference import Reference, conversations
from tests.vlmserve.server_process import media_part, serving
from tests.vlmserve.test_video import conversations as video_conversations

NEW = 12
# the second half also sees what the first left in the caches
ROUNDS = 2


def as_openai(messages: list[dict]) -> list[dict]:
    """PIL pictures, and videos' bytes, to data: URLs."""

    def part_of(part: dict) -> dict:
        if part["type"] == "text":
            return part
        data = part["video"] if part["type"] == "video" else encoded(part["image"])
        return media_part(part["type"], data)

    return [
        {**m, "content": [part_of(p) for p in m["content"]]} if isinstance(m["content"], list) else m for m in messages
    ]


@pytest.mark.slow
@pytest.mark.parametrize("family", [*ALL_FAMILIES, *HYBRIDS, STREAMED])
@pytest.mark.parametrize(
    "flags",
    [
        "--chunked-prefill-size 16 --page-size 1",
        "--chunked-prefill-size 16 --page-size 16 --enable-mixed-chunk",
        "--chunked-prefill-size 64 --page-size 16 --disable-radix-cache",
        "--chunked-prefill-size -1 --page-size 1 --schedule-policy lpm",
    ],
)
def test_served_answers_equal_transformers(family: str, flags: str, tmp_path: Path) -> None:
    folder = make_checkpoint(family, tmp_path / "model")
    reference = Reference(folder)
    asked = conversations() + video_conversations()
    wanted = [reference.answer(messages, NEW) for messages in asked]
    reference_frames = ("--video-reference", "transformers")
    with (
        serving(tmp_path / "run", *flags.split(), *reference_frames, model=folder) as server,
        server.client() as client,
        ThreadPoolExecutor(8) as pool,
    ):

        def ask(messages: list[dict]):
            return client.chat.completions.create(
                model="tiny",
                messages=as_openai(messages),
                max_tokens=NEW,
                temperature=0,
                logprobs=True,
                extra_body={"ignore_eos": True},
            )

        answers = list(pool.map(ask, asked * ROUNDS))
    tokenizer = reference.processor.tokenizer
    for answer, want in zip(answers, wanted * ROUNDS, strict=True):
        assert answer.usage.prompt_tokens == want.prompt_tokens
        content = answer.choices[0].logprobs.content
        assert len(content) == NEW
        for i, entry in enumerate(content):
            if entry.token != tokenizer.decode([want.token_ids[i]]):
                assert want.margins[i] < 1e-3, (i, entry.token, want.margins[i])
                break
            assert abs(entry.logprob - want.logprobs[i]) < 1e-4
