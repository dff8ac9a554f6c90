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


@pytest.fixture(params=LEVELS_HERE)
def operators(request, monkeypatch):
    """The operators of one kind of CPU, with two threads; its name."""
    monkeypatch.delenv(build.LEVEL_VARIABLE, raising=False)
    monkeypatch.setattr(build, "LEVELS", WITH_STAND_IN)
    monkeypatch.setattr(library, "cpu_words", lambda: WITH_STAND_IN[request.param][0])
    said = library.activate("auto", threads=2)
    assert said.startswith(f"operators for {request.param}")
    yield request.param
    library.activate("off", threads=1)
