"""Files' bytes, and what libraries say of them, in words for people."""

from __future__ import annotations

import re

_REPR = re.compile(r"""\bb(?P<quote>['"])(?P<inside>.*?)(?P=quote)""")
_SHOWN = 8


def first_bytes(data: bytes) -> str:
    """What a file begins with: text in quotes, or bytes in hexadecimal."""
    head = data[:_SHOWN]
    if head.isascii() and head.decode("ascii").isprintable():
        return f'"{head.decode("ascii")}"'
    return f"the bytes {head.hex(' ')}"


def words(error: Exception) -> str:
    """An error's own words, without the quotes that Python puts around bytes; its kind where it has none."""
    return _REPR.sub(r'"\g<inside>"', str(error)) or type(error).__name__
