"""A GIF's blocks (GIF89a specification): those before its first picture, as Pillow reads them, and its end."""

from __future__ import annotations

from collections.abc import Iterator

from processors.image.limits import check_count

_SCREEN_BYTES = 13  # header and logical screen descriptor, sections 17 and 18
_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B
_COMMENT, _APPLICATION = 0xFE, 0xFF

# XMP stands as plain text there, each letter taken for a block's length: this is about 10 MB of it.
_MOST_BLOCKS = 2**17
# Pillow copies what it has of the comments for each block that comes to it.
_MOST_COMMENT_BLOCKS, _MOST_COMMENT_BYTES = 10_000, 256 * 2**10


def is_whole_gif(data: bytes) -> bool:
    """Whether it goes on to its end mark, whatever there is behind that."""
    at = _SCREEN_BYTES + _table_bytes(data, 10)
    while at < len(data):
        if data[at] == _TRAILER:
            return True
        if data[at] == _IMAGE:  # section 20, with its table, and the smallest code's size (section 22)
            at += 10 + _table_bytes(data, at + 9) + 1
        elif data[at] == _EXTENSION:
            at += 2
        else:
            return False
        while at < len(data) and data[at]:
            at += 1 + data[at]
        at += 1
    return False


def check_gif(data: bytes) -> None:
    """Raises BadRequestError for a GIF of too many blocks, or too long a comment, before its first picture."""
    blocks = comment_blocks = comment_bytes = 0
    at = _SCREEN_BYTES + _table_bytes(data, 10)
    while at < len(data) and data[at] not in (_IMAGE, _TRAILER):
        blocks += 1
        if data[at] != _EXTENSION:  # nothing known, which Pillow skips byte by byte
            at += 1
            check_count("GIF", "blocks before its first picture", blocks, _MOST_BLOCKS)
            continue
        label = data[at + 1 : at + 2]
        comment = label == bytes([_COMMENT])
        at += 2
        for size in _sub_blocks(data, at, label):
            at += 1 + size
            blocks += 1
            check_count("GIF", "blocks before its first picture", blocks, _MOST_BLOCKS)
            if comment:
                comment_blocks += 1
                comment_bytes += size
                check_count("GIF", "blocks of comments", comment_blocks, _MOST_COMMENT_BLOCKS)
                check_count("GIF", "bytes of comments", comment_bytes, _MOST_COMMENT_BYTES)


def _table_bytes(data: bytes, at: int) -> int:
    """Of the colour table that the byte of flags there tells of (sections 18 and 20)."""
    return 3 << (data[at] & 7) + 1 if at < len(data) and data[at] & 0x80 else 0


def _sub_blocks(data: bytes, at: int, label: bytes) -> Iterator[int]:
    """The sizes, in bytes, of the data sub-blocks from `at` on that Pillow takes for those of one extension.

    They end with an empty one (section 16), but for one that Pillow reads before it looks for the end.
    """
    if at >= len(data):
        return
    certain = 1
    if label == bytes([_COMMENT]):
        certain = 0
    elif label == bytes([_APPLICATION]) and data[at] >= 11 and data[at + 1 : at + 12] == b"NETSCAPE2.0":
        certain = 2
    while at < len(data):
        size = data[at]
        yield size
        if size == 0 and certain <= 0:
            return
        certain -= 1
        at += 1 + size
