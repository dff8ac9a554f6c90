"""The served model, as all of its endpoints see it."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve.api.file_store import FileStore
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """The served model. name: its name for clients. files: the uploaded files that requests may name. formats: how it
    writes calls and thoughts."""

    name: str
    manager: TokenizerManager
    files: FileStore
    settings: ServerSettings
    formats: AnswerFormats

    def check_name(self, name: str) -> None:
        """Raise BadRequestError (404) for a model that is not served here."""
        if name != self.name:
            what = f"there is no model {name!r} here, only {self.name}"
            raise BadRequestError(what, param="model", code="model_not_found", status=404)
