"""Set-up of all tests. Property tests try the same examples in every run, so that only a change can make them fail.

`--hypothesis-profile=fresh --hypothesis-seed=NUMBER` has them try other examples, as `make test-full` does.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.kernels import fused
from vlmserve_common.kernels import library as kernels
from vlmserve_common.kernels.build import CannotBuild, best_level, cache_folder, cpu_words, library

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # kernels for GPUs run on the CPU, then; read when Triton is imported

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.register_profile("fresh", database=None, deadline=None, print_blob=True)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """What test processes inherit; and the operators, built before they and servers all wait for them."""
    if not hasattr(config, "workerinput"):
        # A shell has its background jobs ignore Ctrl-C. The commands under test would inherit that, and wait for ever.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with contextlib.suppress(CannotBuild):
            library(best_level(cpu_words()), cache_folder())[1].close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Of -n auto: more than there are cores, since many tests wait for servers and other processes."""
    cores = available_cpus()
    return cores + cores // 2


def _operators_as_before() -> Iterator[None]:
    """Activated operators and torch's threads are the process's: they must not reach the tests that come after."""
    before, fused_before, threads = kernels._active, fused._device_type, torch.get_num_threads()
    yield
    kernels._active, fused._device_type = before, fused_before
    torch.set_num_threads(threads)


_of_a_module = pytest.fixture(scope="module", autouse=True)(_operators_as_before)
_of_a_test = pytest.fixture(autouse=True)(_operators_as_before)
