"""What groups of ranks move between them, which have requests of their own and share all but attention."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.tiny_checkpoints import MOE, make_checkpoint
from tests.vlmserve.parallel.sharing import DENSE_LAYERS, GREEDY, LAYERS, SETTINGS
from tests.vlmserve.reference import conversations
from vlmserve import LLM
from vlmserve_common.compute.token_exchange import TokenExchange, TokenLayout

TWO_GROUPS = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True}
HIDDEN, WIDTH = 64, 4  # of the tiny models, and bytes of a float32


@contextmanager
def layouts_noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[TokenLayout]]:
    """Of what this process exchanges from here on."""
    found: list[TokenLayout] = []
    among = TokenExchange.among

    @contextmanager
    def noting(self: TokenExchange, sizes) -> Iterator[TokenLayout]:
        with among(self, sizes) as layout:
            found.append(layout)
            yield layout

    with monkeypatch.context() as patched:
        patched.setattr(TokenExchange, "among", noting)
        yield found


@pytest.mark.parametrize("family", ["qwen3_vl", MOE])
def test_no_more_is_moved_than_said(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Ids and rows of all tokens for the embedding, rows twice for each MLP, and those of sampled tokens for the head;
    where rows are sent to experts, nothing is brought together for these."""
    more = {"ep_size": 2} if family == MOE else {}
    shared = DENSE_LAYERS if family == MOE else LAYERS
    with LLM(str(make_checkpoint(family, tmp_path / "model")), **TWO_GROUPS, **more, **SETTINGS) as llm:
        group = llm.engine.ranks.group
        group.counts.clear()
        group.bytes.clear()
        with layouts_noted(monkeypatch) as layouts:
            llm.chat_batch(conversations()[:3], GREEDY)
        counts, moved = Counter(group.counts), Counter(group.bytes)
    steps, sampled = layouts[::2], layouts[1::2]  # chunks are as long as prompts here: each step is sampled
    assert {layout.padded for layout in steps} == {True, False}
    expected, expected_counts = Counter(), Counter()
    for layout in steps:
        gathering, scattering = ("all_gather", "reduce_scatter") if layout.padded else ("all_reduce", "all_reduce")
        row = HIDDEN * WIDTH
        expected[gathering] += layout.rows * (8 + shared * row)
        expected[scattering] += layout.rows * (1 + shared) * row
        expected_counts[gathering] += 1 + shared
        expected_counts[scattering] += 1 + shared
    for layout in sampled:
        gathering = "all_gather" if layout.padded else "all_reduce"
        expected[gathering] += layout.rows * HIDDEN * WIDTH
        expected_counts[gathering] += 1
    for name in ("all_gather", "reduce_scatter", "all_reduce"):
        assert counts[name] == expected_counts[name], name
        assert moved[name] == expected[name], name
    assert counts["all_to_all"] == (len(steps) * (LAYERS - DENSE_LAYERS) * 4 if family == MOE else 0)
