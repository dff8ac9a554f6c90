"""The sampler: limits, bias, penalties, logprobs, and noise that depends on seed and output index only."""

import numpy as np
import pytest
import torch

from tests import hf_env  # noqa: F401
from vlmserve.executor import sampler
from vlmserve.executor.launched_step import Forwarded, LaunchedResult
from vlmserve.executor.model_worker_batch import SamplingBatchInfo
from vlmserve_common.compute.transfers import Mark, Transfers

VOCAB = 40


def info(rows=1, **overrides):
    values = {
        "batch_indices": np.arange(rows),
        "token_indices": np.arange(rows),
        "temperatures": np.ones(rows, np.float32),
        "top_ps": np.ones(rows, np.float32),
        "top_ks": np.full(rows, -1),
        "min_ps": np.zeros(rows, np.float32),
        "seeds": np.zeros(rows, np.int64),
        "output_indices": np.arange(rows),
        "num_logprobs": np.full(rows, -1),
        "bias_rows": np.zeros(0, np.int64),
        "bias_ids": np.zeros(0, np.int64),
        "bias_values": np.zeros(0, np.float32),
        "count_rows": np.zeros(0, np.int64),
        "count_ids": np.zeros(0, np.int64),
        "count_values": np.zeros(0, np.int64),
        "presence": np.zeros(rows, np.float32),
        "frequency": np.zeros(rows, np.float32),
        "seen_rows": np.zeros(0, np.int64),
        "seen_ids": np.zeros(0, np.int64),
        "repetition": np.ones(rows, np.float32),
    }
    return SamplingBatchInfo(**(values | {k: np.asarray(v) for k, v in overrides.items()}))


def sample(rows, given):
    return sampler.sample(rows, given, sampler.sent(given, rows))


def adjusted(rows, given, in_flight=None):
    return sampler.adjust(rows, sampler.sent(given, rows), None if in_flight is None else torch.tensor(in_flight))


def result(rows, given):
    """What the scheduler gets of it."""
    forwarded = Forwarded(
        step=0,
        req_pool_indices=np.arange(len(rows)),
        places=np.arange(len(rows)),
        hidden=rows,
        returned=None,
        prompt_logprobs=None,
        began=Mark(),
        ended=Mark(),
    )
    return LaunchedResult(forwarded, sample(rows, given), Mark(), Transfers()).result()


def logits(seed=0):
    return torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


def draw(row, count, **overrides):
    """`count` samples from one row of logits, output indices 0, 1, ..."""
    full = {k: np.repeat(np.asarray(v), count) for k, v in overrides.items()}
    return sample(row.expand(count, -1), info(count, **full)).next_token_ids.numpy()


def test_samples_follow_the_distribution():
    row = logits()
    count = 20000
    seen = np.bincount(draw(row, count, temperatures=np.float32(0.7)), minlength=VOCAB) / count
    want = torch.softmax(row[0] / 0.7, -1).numpy()
    assert np.abs(seen - want).max() < 0.012
    other = np.bincount(draw(row, count, temperatures=np.float32(0.7), seeds=12345), minlength=VOCAB) / count
    assert np.abs(other - want).max() < 0.012


def test_noise_depends_on_seed_and_output_index_only():
    rows = torch.cat([logits(i) for i in range(8)])
    seeds, indices = np.arange(8) * 7, np.arange(8)[::-1].copy()
    together = sample(rows, info(8, seeds=seeds, output_indices=indices)).next_token_ids
    for i in range(8):
        alone = sample(rows[i : i + 1], info(1, seeds=seeds[i : i + 1], output_indices=indices[i : i + 1]))
        assert alone.next_token_ids[0] == together[i]
    assert len(set(draw(torch.zeros(1, VOCAB), 30).tolist())) > 10
    assert len({int(draw(torch.zeros(1, VOCAB), 1, seeds=seed)[0]) for seed in range(30)}) > 10


def test_a_batch_mate_with_other_limits_changes_nothing():
    row = logits(3)
    for index in range(20):
        alone = sample(row, info(1, top_ks=[5], output_indices=[index])).next_token_ids[0]
        mixed = sample(
            row.expand(3, -1), info(3, top_ks=[-1, 5, 2], top_ps=np.float32([0.5, 1, 1]), output_indices=[0, index, 1])
        )
        assert mixed.next_token_ids[1] == alone


@pytest.mark.parametrize("top_k", [1, 3, VOCAB, VOCAB + 5])
def test_top_k(top_k):
    row = logits()
    best = set(row[0].topk(min(top_k, VOCAB)).indices.tolist())
    seen = set(draw(row, 3000, top_ks=top_k, temperatures=np.float32(2)).tolist())
    assert seen <= best
    assert len(seen) > len(best) * 0.9 - 1


@pytest.mark.parametrize("top_p", [0.0, 0.3, 0.9])
def test_top_p_keeps_the_smallest_set_with_that_mass(top_p):
    row = logits()
    probs, ids = torch.softmax(row[0], -1).sort(descending=True)
    keep = int((probs.cumsum(0) < top_p).sum()) + 1
    assert set(draw(row, 4000, top_ps=np.float32(top_p)).tolist()) == set(ids[:keep].tolist())


@pytest.mark.parametrize("min_p", [0.05, 0.3])
def test_min_p(min_p):
    row = logits()
    probs = torch.softmax(row[0], -1)
    allowed = set(torch.nonzero(probs >= min_p * probs.max())[:, 0].tolist())
    assert set(draw(row, 3000, min_ps=np.float32(min_p)).tolist()) == allowed


def test_greedy_rows_beside_random_ones():
    rows = torch.cat([logits(i) for i in range(4)])
    out = sample(rows, info(4, temperatures=np.float32([0, 1, 0, 1])))
    assert out.next_token_ids[0] == rows[0].argmax()
    assert out.next_token_ids[2] == rows[2].argmax()


def test_temperatures_too_small_to_divide_by_are_greedy():
    row = logits()
    for temperature in (1e-4, 1e-6, 1e-30, 1e-45):
        assert set(draw(row, 20, temperatures=np.float32(temperature)).tolist()) == {int(row.argmax())}


def test_other_tokens_than_the_allowed_ones_are_impossible():
    rows = torch.arange(3 * VOCAB, dtype=torch.float32).reshape(3, VOCAB)
    given = info(
        3, allowed_rows=[2, 0, 0], allowed_ids=[4, 7, 9], bias_rows=[0], bias_ids=[7], bias_values=[np.float32(5)]
    )
    found = adjusted(rows, given)
    assert found.isfinite().nonzero().tolist() == [[0, 7], [0, 9], *([1, token] for token in range(VOCAB)), [2, 4]]
    assert found[0, 7] == rows[0, 7] + 5
    assert rows.isfinite().all(), "the model's own logits stay, for logprobs"


def test_bias_and_penalties_change_the_choice_and_not_the_logprobs():
    row = logits()
    best = int(row.argmax())
    greedy = {"temperatures": np.zeros(1, np.float32), "num_logprobs": [2]}
    biased = result(row, info(1, bias_rows=[0], bias_ids=[5], bias_values=np.float32([100]), **greedy))
    assert biased.next_token_ids[0] == 5
    assert biased.logprobs[0] == pytest.approx(torch.log_softmax(row, -1)[0, 5].item(), abs=1e-6)
    assert biased.top_ids[0, 0] == best
    second = int(row[0].topk(2).indices[1])
    gap = (row[0, best] - row[0, second]).item()
    for penalty, times in (
        ({"presence": np.float32([gap + 0.01])}, 1),
        ({"frequency": np.float32([gap / 3 + 0.01])}, 3),
    ):
        out = sample(row, info(1, count_rows=[0], count_ids=[best], count_values=[times], **penalty, **greedy))
        assert out.next_token_ids[0] == second


def test_repetition_penalty_is_that_of_transformers():
    from transformers import RepetitionPenaltyLogitsProcessor

    rows = torch.cat([logits(i) for i in range(3)])
    seen = torch.tensor([[1, 5, 7, 5], [0, 2, 4, 39]])
    want = RepetitionPenaltyLogitsProcessor(1.7)(seen, rows[:2].clone())
    got = adjusted(
        rows,
        info(
            3,
            seen_rows=[0, 0, 0, 1, 1, 1, 1],
            seen_ids=[1, 5, 7, 0, 2, 4, 39],
            repetition=np.float32([1.7, 1.7, 1.0]),
        ),
    )
    assert torch.allclose(got[:2], want)
    assert torch.equal(got[2], rows[2])


def test_logprobs_where_asked_for():
    rows = torch.cat([logits(i) for i in range(3)])
    out = result(rows, info(3, temperatures=np.zeros(3, np.float32), num_logprobs=[-1, 0, 3]))
    want = torch.log_softmax(rows, -1)
    assert np.isnan(out.logprobs[0])
    assert out.logprobs[1] == pytest.approx(want[1].max().item(), abs=1e-6)
    assert out.top_logprobs.shape == (3, 3)
    assert np.allclose(out.top_logprobs[2], want[2].topk(3).values)


def bitmask(*ids):
    bits = np.zeros(64, dtype=bool)
    bits[list(ids)] = True
    return np.packbits(bits, bitorder="little").view(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_grammar_has_the_last_word_and_only_on_its_rows(temperature):
    rows = torch.cat([logits(i) for i in range(3)])
    before = rows.clone()
    best = int(rows[1].argmin())
    given = {
        "temperatures": np.full(3, temperature, np.float32),
        "num_logprobs": np.full(3, 1),
        "bias_rows": [1, 1],
        "bias_ids": [best, 7],
        "bias_values": np.array([-100, 100], np.float32),
    }
    free = result(rows, info(3, **given))
    masked = result(rows, info(3, masked_rows=[1], bitmasks=[bitmask(best)], **given))
    assert int(masked.next_token_ids[1]) == best
    assert masked.next_token_ids[[0, 2]].tolist() == free.next_token_ids[[0, 2]].tolist()
    assert torch.equal(rows, before), "the model's logits stay"
    assert np.isclose(masked.logprobs[1], torch.log_softmax(before[1], -1)[best])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_all_that_a_grammar_allows_is_ruled_out_it_is_taken_nevertheless(temperature):
    row = logits()
    row[0, [3, 5]] = -torch.inf
    given = {"temperatures": np.full(1, temperature, np.float32)}
    assert int(sample(row, info(masked_rows=[0], bitmasks=[bitmask(3, 5)], **given)).next_token_ids[0]) in (3, 5)


def by_the_book(row, known, all_of_them, given):
    """Penalties as they are defined, of one row with all its tokens known."""
    out = row.clone()
    prompt = {3, 5}
    for token in prompt | set(all_of_them):
        out[token] = out[token] / given["repetition"] if out[token] > 0 else out[token] * given["repetition"]
    for token in set(all_of_them):
        times = np.float32(all_of_them.count(token))
        out[token] -= torch.tensor(np.float32(given["frequency"]) * times + np.float32(given["presence"]))
    return out


@pytest.mark.parametrize("in_flight", [[7], [5], [9], [7, 7], [11, 11], [11, 7, 30], [5, 11, 11, 5, 7]])
@pytest.mark.parametrize(
    "given",
    [
        {"repetition": 1.3, "frequency": 0.0, "presence": 0.0},
        {"repetition": 1.0, "frequency": 0.7, "presence": 0.0},
        {"repetition": 1.0, "frequency": 0.0, "presence": 0.4},
        {"repetition": 1.7, "frequency": -0.3, "presence": 0.9},
    ],
)
@pytest.mark.parametrize("known", [[], [7, 9, 7, 30]])
def test_tokens_in_flight_are_penalised_bit_for_bit_like_known_ones(known, given, in_flight):
    """Beside a request whose tokens are all known, and one without penalties."""
    rows = torch.cat([logits(i) for i in range(3)])

    def of(histories, unknown):
        counts = [
            (row, *one) for row, ids in histories for one in zip(*np.unique(ids, return_counts=True), strict=True)
        ]
        seen = [(row, token) for row, ids in histories for token in sorted({3, 5, *ids})]
        count_rows, count_ids, count_values = np.array(counts, np.int64).reshape(-1, 3).T
        seen_rows, seen_ids = np.array(seen, np.int64).reshape(-1, 2).T
        return info(
            3,
            count_rows=count_rows,
            count_ids=count_ids,
            count_values=count_values,
            seen_rows=seen_rows,
            seen_ids=seen_ids,
            repetition=np.float32([given["repetition"], given["repetition"], 1]),
            frequency=np.float32([given["frequency"], given["frequency"], 0]),
            presence=np.float32([given["presence"], given["presence"], 0]),
            in_flight_rows=np.zeros(len(unknown), np.int64),
            in_flight_places=np.arange(len(unknown)),
        )

    mate = [7, 7, 2]
    want = adjusted(rows, of([(0, known + in_flight), (1, mate)], []))
    got = adjusted(rows, of([(0, known), (1, mate)], in_flight), in_flight)
    assert torch.equal(got, want)
    assert torch.equal(got[2], rows[2])
    assert not torch.equal(got[0], rows[0])
    assert torch.allclose(got[0], by_the_book(rows[0], known, known + in_flight, given))
