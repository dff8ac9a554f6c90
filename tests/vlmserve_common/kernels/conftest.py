"""Operators of every kind of CPU that this one can stand in for."""

from __future__ import annotations

from types import MappingProxyType

import pytest

from vlmserve_common.kernels import build, library
from vlmserve_common.kernels.build import LEVELS, cpu_words

WORDS, FLAGS = LEVELS["avx512_bf16"]
# AMX's registers by a stand-in, so that all but the instructions is tested where there are none.
WITH_STAND_IN = MappingProxyType({"amx_stand_in": (WORDS | {"stand_in"}, (*FLAGS, "-DAMX_STAND_IN"))} | dict(LEVELS))
LEVELS_HERE = [level for level, (needed, _) in WITH_STAND_IN.items() if needed <= cpu_words() | {"stand_in"}]
QUICK = ("amx_stand_in", "avx2", *LEVELS_HERE[1:2])  # the best of this CPU, and those with code of their own


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave time to build the operators, which the first test of a level does."""
    for item in items:
        if "operators" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(900))


@pytest.fixture(params=[pytest.param(level, marks=[] if level in QUICK else pytest.mark.slow) for level in LEVELS_HERE])
def operators(request, monkeypatch):
    """The operators of one kind of CPU, with two threads; its name."""
    monkeypatch.delenv(build.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(build, "LEVELS", WITH_STAND_IN)
    monkeypatch.setattr(library, "cpu_words", lambda: WITH_STAND_IN[request.param][0])
    said = library.activate("auto", threads=2)
    assert said.startswith(f"operators for {request.param}")
    yield request.param
    library.activate("off", threads=1)
