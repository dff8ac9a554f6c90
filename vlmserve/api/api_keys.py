"""API keys and their holders. Keys are kept as SHA-256 digests, and compared in constant time."""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmserve.config.checks import SettingsError
from vlmserve.config.settings import ServerSettings

logger = logging.getLogger(__name__)

_NAME = re.compile(r"[\w.@+-]{1,64}")
_DIGEST = re.compile(r"sha256:([0-9a-fA-F]{64})")


@dataclass(frozen=True, kw_only=True, slots=True)
class KeyHolder:
    """The holder of a key. name: the name in --api-key-file; "" for --api-key. owner: a digest, which files and
    sessions belong to."""

    name: str
    owner: str


class ApiKeys:
    """The digests of keys, and their holders. shared: there are several holders."""

    def __init__(self, entries: Sequence[tuple[bytes, KeyHolder]]) -> None:
        self._entries = tuple(entries)
        self.shared = len({holder.owner for _, holder in entries}) > 1

    def holder(self, key: bytes) -> KeyHolder | None:
        """Return the holder of a key, or None for an unknown key. The time is the same for every key."""
        digest, found = hashlib.sha256(key).digest(), None
        for known, holder in self._entries:
            if hmac.compare_digest(digest, known):
                found = holder
        return found


def share_of(total: int, held: Mapping[str, int], owner: str, *, shared: bool) -> tuple[int, int, str]:
    """Return how much of a total an owner has, how much it may have, and this limit in words.

    held: the amounts of all owners. shared: each owner may have half of the total that the others leave, so that there
    is room for the next one. False: all owners count as one.
    """
    taken = sum(held.values())
    if not shared:
        return taken, total, str(total)
    own = held.get(owner, 0)
    most = max(0, total - taken + own + 1) // 2
    return own, most, f"{most}, half of what other API keys leave of {total}"


def read_api_keys(settings: ServerSettings) -> ApiKeys | None:
    """Read the keys that the settings name. None means that no key is needed. Raises SettingsError for a bad file."""
    entries = []
    if settings.api_key is not None:
        key = settings.api_key.encode()
        entries.append((hashlib.sha256(key).digest(), KeyHolder(name="", owner=_owner(b"", key))))
    if settings.api_key_file is not None:
        entries += _entries_of(Path(settings.api_key_file))
    return ApiKeys(entries) if entries else None


def _entries_of(path: Path) -> list[tuple[bytes, KeyHolder]]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        exposed = path.stat().st_mode & 0o044
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--api-key-file {path}: cannot be read: {error}") from None
    found: dict[bytes, KeyHolder] = {}
    plain = False
    for number, line in enumerate(lines, 1):
        words, place = line.split(), f"--api-key-file {path}, line {number}"  # no error shows a key
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2:
            raise SettingsError(f"{place}: it has {len(words)} words; it must be a name and a key")
        name, key = words
        hashed = _DIGEST.fullmatch(key)
        if not _NAME.fullmatch(name):
            raise SettingsError(f"{place}: a name is 1 to 64 letters, digits and any of . _ @ + -")
        if key.startswith("sha256:") and hashed is None:
            raise SettingsError(f"{place}: sha256: must be followed by 64 hexadecimal digits")
        plain = plain or hashed is None
        digest = hashlib.sha256(key.encode()).digest() if hashed is None else bytes.fromhex(hashed.group(1))
        if digest in found:
            raise SettingsError(f"{place}: the same key is in an earlier line")
        found[digest] = KeyHolder(name=name, owner=_owner(b" by name", name.encode()))
    if not found:
        raise SettingsError(f"--api-key-file {path}: there is no key in it")
    if plain and exposed and path.stat().st_uid == os.getuid():
        logger.warning("--api-key-file %s has keys, and others can read it: chmod 600, or sha256: digests", path)
    return list(found.items())


def _owner(kind: bytes, what: bytes) -> str:
    return hashlib.sha256(b"vlmserve owner of files" + kind + b": " + what).hexdigest()
