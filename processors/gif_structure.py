"""What stands before a GIF's first picture (GIF89a specification), counted as Pillow reads it: block by block."""

from __future__ import annotations

from collections.abc import Iterator

from processors.picture_limits import check_count

_SCREEN_BYTES = 13  # header and logical screen descriptor, sections 17 and 18
_EXTENSION, _IMAGE, _TRAILER = 0x21, 0x2C, 0x3B
_COMMENT, _APPLICATION = 0xFE, 0xFF

# XMP stands as plain text there, each letter taken for a block's length: this is about 10 MB of it.
_MOST_BLOCKS = 2**17
# Pillow copies what it has of the comments for each block that comes to it.
_MOST_COMMENT_BLOCKS, _MOST_COMMENT_BYTES = 10_000, 256 * 2**10


def check_gif(data: bytes) -> None:
    """Raises BadRequestError for a GIF of too many blocks, or too long a comment, before its first picture."""
    blocks = comment_blocks = comment_bytes = 0
    at = _SCREEN_BYTES
    if len(data) > 10 and data[10] & 0x80:  # a global colour table follows
        at += 3 << (data[10] & 7) + 1
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
