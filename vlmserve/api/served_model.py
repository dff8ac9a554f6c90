"""What the endpoints of a model share."""

from __future__ import annotations

from dataclasses import dataclass

from vlmserve.api.file_store import FileStore
from vlmserve.config.settings import ServerSettings
from vlmserve.frontend.parsers.answer import AnswerFormats
from vlmserve.frontend.tokenizer_manager import TokenizerManager
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True)
class ServedModel:
    """name: what clients call it. files: those that requests may bring. formats: how it writes its answers."""

    name: str
    manager: TokenizerManager
    files: FileStore
    settings: ServerSettings
    formats: AnswerFormats

    def check_name(self, name: str) -> None:
        """Raises BadRequestError (404) for a model that is not served here."""
        if name != self.name:
            what = f"there is no model {name!r} here, only {self.name}"
            raise BadRequestError(what, param="model", code="model_not_found", status=404)
