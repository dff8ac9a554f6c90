"""Hybrid models on a GPU that is not there: nothing of a step waits for it, its recurrent layers included."""

from tests import hf_env  # noqa: F401
from tests.fake_cuda.engine import move_engine
from tests.fake_cuda.tensors import FakeCuda
from tests.tiny_checkpoints import HYBRID, make_checkpoint
from tests.vlmserve.reference import ask, picture
from vision.towers import attention
from vlmserve import LLM, SamplingOverrides

GREEDY = SamplingOverrides(temperature=0.0, max_new_tokens=6, ignore_eos=True)
LONG = "How many red circles are there on the left side of the blue square? " * 4


def test_no_step_waits_and_answers_are_those_of_the_cpu(tmp_path, monkeypatch):
    # this GPU has no kernels of Triton's, and the trial of these waits: on a real one before the first step
    monkeypatch.setattr(attention, "gpu_kernels_work", lambda device, dtype, dim: False)
    folder = make_checkpoint(HYBRID, tmp_path / "model")
    asked = [ask(LONG), ask("Hi."), ask(LONG + "Count.", picture(1, 112, 112))]
    settings = {"num_threads": 1, "max_total_tokens": 4096, "cpu_kernels": "off", "page_size": 16}
    with LLM(str(folder), **settings) as llm:
        wanted = [llm.chat_batch(asked, GREEDY) for _ in range(2)]
    with LLM(str(folder), **settings) as llm, FakeCuda() as cuda:
        runner = move_engine(llm, cuda)
        syncs = []
        forward = runner.forward

        def counted(batch):
            with cuda.counting() as counts:
                forwarded = forward(batch)
            syncs.append(counts.syncs)
            return forwarded

        monkeypatch.setattr(runner, "forward", counted)
        got = [llm.chat_batch(asked, GREEDY) for _ in range(2)]
    for ours, theirs in zip(got, wanted, strict=True):
        assert [answer.token_ids for answer in ours] == [answer.token_ids for answer in theirs]
        assert [answer.cached_tokens for answer in ours] == [answer.cached_tokens for answer in theirs]
    assert got[1][0].cached_tokens >= 64
    assert len(syncs) > 10
    assert not any(syncs), syncs
