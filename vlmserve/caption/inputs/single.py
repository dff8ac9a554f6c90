"""Inputs made of others: one medium, or the same kind of file several times."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from vlmserve.caption.inputs.media import MediaReader
from vlmserve.caption.inputs.source import Source
from vlmserve.caption.item import Found, Unreadable


@dataclass(frozen=True, kw_only=True)
class OneMedium:
    """See `Source`."""

    address: str
    media: MediaReader

    def __iter__(self) -> Iterator[Found]:
        yield self.media.item(self.address)

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        return iter((1,))


@dataclass(frozen=True, kw_only=True)
class Each:
    """See `Source`. names: files, and what could not be searched for them. open: makes a source of one."""

    names: Callable[[], Iterator[str | Unreadable]]
    open: Callable[[str], Source]

    def __iter__(self) -> Iterator[Found]:
        for name in self.names():
            if isinstance(name, Unreadable):
                yield name
            else:
                yield from self.open(name)

    def count(self) -> Iterator[int | None]:
        """See `Source`."""
        for name in self.names():
            if isinstance(name, str):
                yield from self.open(name).count()
