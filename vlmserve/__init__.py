"""vlmserve: a serving engine for Qwen-VL models. `from vlmserve import LLM, SamplingOverrides` is the offline form."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vlmserve_common.version import __version__

__all__ = ["LLM", "SamplingOverrides", "__version__"]

if TYPE_CHECKING:
    from vlmserve.commands.offline.llm import LLM
    from vlmserve.frontend.sampling import SamplingOverrides


def __getattr__(name: str) -> object:
    """Import the engine only when it is asked for, so that `import vlmserve` stays light."""
    if name == "LLM":
        from vlmserve.commands.offline.llm import LLM

        return LLM
    if name == "SamplingOverrides":
        from vlmserve.frontend.sampling import SamplingOverrides

        return SamplingOverrides
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
