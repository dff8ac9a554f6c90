"""Property tests try the same examples in every run: a failure is the change's doing, not the dice's."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from vlmserve_common.kernels import library as kernels
from vlmserve_common.kernels.build import CannotBuild, best_level, cache_folder, cpu_words, library

settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


def pytest_configure(config: pytest.Config) -> None:
    """Build the operators, where they are not there, before test processes and servers all wait for them."""
    if not hasattr(config, "workerinput"):
        with contextlib.suppress(CannotBuild):
            library(best_level(cpu_words()), cache_folder())[1].close()


def _operators_as_before() -> Iterator[None]:
    """Activated operators and torch's threads are the process's: they must not reach the tests that come after."""
    before, threads = kernels._active, torch.get_num_threads()
    yield
    kernels._active = before
    torch.set_num_threads(threads)


_of_a_module = pytest.fixture(scope="module", autouse=True)(_operators_as_before)
_of_a_test = pytest.fixture(autouse=True)(_operators_as_before)
