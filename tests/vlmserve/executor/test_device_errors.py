"""What goes wrong on a GPU: who hears of it, and in which words."""

from __future__ import annotations

import pytest
import torch

from tests import hf_env  # noqa: F401
from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Rig
from vlmserve.executor.device_errors import device_errors
from vlmserve_common.errors import DeviceLostError, EngineError

ASSERTION = "CUDA error: device-side assert triggered\nCUDA kernel errors might be asynchronously reported"


def test_too_little_memory_is_the_step_s_error_and_names_settings():
    with pytest.raises(EngineError, match="step 7 needs more GPU memory") as raised, device_errors("step 7"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    assert not isinstance(raised.value, DeviceLostError)
    for word in ("2.00 GiB", "--mem-fraction-static", "--chunked-prefill-size", "--max-running-requests"):
        assert word in str(raised.value)


def test_what_cuda_reports_loses_the_device():
    told = r"step 7, .*: CUDA error: device-side assert triggered \("
    with pytest.raises(DeviceLostError, match=told) as raised, device_errors("step 7"):
        raise torch.AcceleratorError(ASSERTION)
    assert "\n" not in str(raised.value)


def test_other_errors_stay_as_they_are():
    with pytest.raises(ValueError, match="a bug"), device_errors("step 7"):
        raise ValueError("a bug")
    with pytest.raises(RuntimeError, match="shapes differ"), device_errors("step 7"):
        raise RuntimeError("shapes differ")


class Late:
    """A result that fails where it is waited for, as what was launched on a GPU does."""

    def __init__(self, failure: Exception) -> None:
        self.failure = failure

    def result(self):
        raise self.failure


def failing(failure: Exception) -> Rig:
    rig = Rig()
    rig.handle(request("a", [1, 2, 3], new=5))
    good = rig.worker.sample
    rig.worker.sample = lambda forwarded, info: Late(failure) if forwarded[0].step == 2 else good(forwarded, info)
    return rig


def test_a_step_s_error_ends_its_requests_and_says_why():
    rig = failing(EngineError("step 2 needs more GPU memory than is left"))
    rig.step()
    rig.step()
    assert rig.finish["a"].type == "error"
    assert rig.finish["a"].message == "internal error: step 2 needs more GPU memory than is left"
    rig.run(request("b", [1, 2, 3], new=2))
    assert rig.finish["b"].type == "length"


def test_a_lost_device_ends_the_engine():
    rig = failing(DeviceLostError("the GPU failed at step 2"))
    rig.step()
    with pytest.raises(DeviceLostError, match="failed at step 2"):
        rig.step()
    assert rig.finish["a"].type == "error"
