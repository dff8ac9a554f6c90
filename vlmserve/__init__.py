"""vlmserve: a serving engine for Qwen-VL models. `from vlmserve import LLM, SamplingParams` runs it in this process.

Every name here is imported when it is first asked for, so that `import vlmserve` stays light.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from processors.fetch.limits import FetchSettings as FetchSettings
    from vlmserve.commands.client.boxes import Box as Box
    from vlmserve.commands.client.boxes import Marks as Marks
    from vlmserve.commands.client.boxes import Point as Point
    from vlmserve.commands.client.boxes import parse_boxes as parse_boxes
    from vlmserve.commands.offline.async_llm import AsyncLLM as AsyncLLM
    from vlmserve.commands.offline.llm import LLM as LLM
    from vlmserve.commands.offline.llm import Completion as Completion
    from vlmserve.commands.offline.llm import RankedDocument as RankedDocument
    from vlmserve.commands.offline.session import Session as Session
    from vlmserve.config.checks import SettingsError as SettingsError
    from vlmserve.config.engine_args import EngineArgs as EngineArgs
    from vlmserve.frontend.chat_messages import EmbedsRef as EmbedsRef
    from vlmserve.frontend.chat_messages import ImageRef as ImageRef
    from vlmserve.frontend.chat_messages import MediaCounts as MediaCounts
    from vlmserve.frontend.chat_messages import VideoRef as VideoRef
    from vlmserve.frontend.live_requests import RequestAbortedError as RequestAbortedError
    from vlmserve.frontend.requests import ChatPrompt as ChatPrompt
    from vlmserve.frontend.requests import EmbedsPrompt as EmbedsPrompt
    from vlmserve.frontend.requests import GenerateReqInput as GenerateReqInput
    from vlmserve.frontend.requests import TextPrompt as TextPrompt
    from vlmserve.frontend.requests import TokensPrompt as TokensPrompt
    from vlmserve.frontend.requests import read_input_embeds as read_input_embeds
    from vlmserve.frontend.sampling import SamplingOverrides as SamplingOverrides
    from vlmserve.frontend.scores import LabelScore as LabelScore
    from vlmserve.frontend.stage import StageLimits as StageLimits
    from vlmserve.frontend.tokenizer_manager import ChoiceOutput as ChoiceOutput
    from vlmserve.ipc.messages import GrammarSpec as GrammarSpec
    from vlmserve.ipc.messages import LogitsProcessorCall as LogitsProcessorCall
    from vlmserve.ipc.messages import ReturnOptions as ReturnOptions
    from vlmserve_common.errors import BadRequestError as BadRequestError
    from vlmserve_common.errors import CheckpointError as CheckpointError
    from vlmserve_common.errors import EngineError as EngineError
    from vlmserve_common.errors import EngineUnavailableError as EngineUnavailableError
    from vlmserve_common.errors import VlmserveError as VlmserveError
    from vlmserve_common.version import __version__ as __version__

    SamplingParams = SamplingOverrides

_EXPORTS = {
    "processors.fetch.limits": "FetchSettings",
    "vlmserve.commands.client.boxes": "Box Marks Point parse_boxes",
    "vlmserve.commands.offline.async_llm": "AsyncLLM",
    "vlmserve.commands.offline.llm": "Completion LLM RankedDocument",
    "vlmserve.commands.offline.session": "Session",
    "vlmserve.config.checks": "SettingsError",
    "vlmserve.config.engine_args": "EngineArgs",
    "vlmserve.frontend.chat_messages": "EmbedsRef ImageRef MediaCounts VideoRef",
    "vlmserve.frontend.live_requests": "RequestAbortedError",
    "vlmserve.frontend.requests": "ChatPrompt EmbedsPrompt GenerateReqInput TextPrompt TokensPrompt read_input_embeds",
    "vlmserve.frontend.sampling": "SamplingOverrides",
    "vlmserve.frontend.scores": "LabelScore",
    "vlmserve.frontend.stage": "StageLimits",
    "vlmserve.frontend.tokenizer_manager": "ChoiceOutput",
    "vlmserve.ipc.messages": "GrammarSpec LogitsProcessorCall ReturnOptions",
    "vlmserve_common.errors": "BadRequestError CheckpointError EngineError EngineUnavailableError VlmserveError",
    "vlmserve_common.version": "__version__",
}
_PLACES = {name: (module, name) for module, names in _EXPORTS.items() for name in names.split()}
_PLACES["SamplingParams"] = ("vlmserve.frontend.sampling", "SamplingOverrides")  # the field's name for it

__all__ = [*_PLACES]


def __getattr__(name: str) -> Any:
    """Import what a name stands for."""
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, inner = _PLACES[name]
    value = globals()[name] = getattr(importlib.import_module(module), inner)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


# Names of modules that the documentation of version 0.1 had. They have all names of this package.
for _former in (
    *("client", "client.boxes", "messages", "offline", "offline.async_llm", "offline.llm"),
    *("tokenizer", "tokenizer.chat_messages", "tokenizer.input_embeds"),
    *("tokenizer.request_builder", "tokenizer.sampling", "tokenizer.stage"),
):
    _module = sys.modules[f"{__name__}.{_former}"] = ModuleType(f"{__name__}.{_former}")
    _module.__spec__ = ModuleSpec(_module.__name__, None, is_package=True)
    vars(_module).update(__getattr__=__getattr__, __path__=[])
    _parent, _, _last = _module.__name__.rpartition(".")
    setattr(sys.modules[_parent], _last, _module)
del _former, _module, _parent, _last
