"""Reading of config.json and other JSON files, typed. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vlmserve_common.errors import CheckpointError


def read_json(folder: Path, name: str, *, required: bool = True) -> dict[str, Any]:
    """A JSON object of a checkpoint folder; {} for an optional file that is not there.

    Raises CheckpointError when a required file is missing, or when it is not a JSON object.
    """
    path = folder / name
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        if not required:
            return {}
        raise CheckpointError(f"{folder} has no {name}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: a JSON object is expected, not {type(value).__name__}")
    return value


@dataclass(frozen=True)
class Fields:
    """Fields of a JSON object, for errors called `where`. A field that is null counts as absent.

    All methods raise CheckpointError for a value of the wrong type, and for an absent one that has no default.
    """

    values: Mapping[str, Any]
    where: str

    def integer(self, name: str, default: int | None = None) -> int:
        """A whole number."""
        return self._get(name, int, default)

    def positive(self, name: str, default: int | None = None) -> int:
        """A whole number above 0."""
        value = self.integer(name, default)
        if value <= 0:
            raise CheckpointError(f"{self.where}: {name} is {value}, and must be above 0")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A number."""
        return float(self._get(name, (int, float), default))

    def string(self, name: str, default: str | None = None) -> str:
        """A string."""
        return self._get(name, str, default)

    def flag(self, name: str, default: bool | None = None) -> bool:
        """true or false."""
        return self._get(name, bool, default)

    def integers(self, name: str, default: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """A list of whole numbers."""
        value = self._get(name, (list, tuple), default)
        if not all(isinstance(entry, int) and not isinstance(entry, bool) for entry in value):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, and must be a list of whole numbers")
        return tuple(value)

    def section(self, name: str) -> Fields:
        """A nested object; an empty one when absent."""
        return Fields(self._get(name, dict, {}), f"{self.where}: {name}")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def allow(self, name: str, value: object, allowed: tuple[object, ...]) -> None:
        """CheckpointError if a field has none of the values that are supported."""
        if value not in allowed:
            raise CheckpointError(f"{self.where}: {name} is {value!r}; supported: {', '.join(map(repr, allowed))}")

    def _get(self, name: str, types: type | tuple[type, ...], default: Any) -> Any:
        value = self.values.get(name)
        if value is None:
            if default is None:
                raise CheckpointError(f"{self.where}: {name} is missing")
            return default
        wrong_bool = isinstance(value, bool) and types is not bool
        if wrong_bool or not isinstance(value, types):
            raise CheckpointError(f"{self.where}: {name} is {value!r}, of type {type(value).__name__}")
        return value
