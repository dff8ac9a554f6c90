"""What a packet of H.264 says of itself before it is decoded."""

from __future__ import annotations

_SLICE = range(1, 6)  # types of units that hold a part of a picture (ITU-T H.264, table 7-1)
_TELLS_NOTHING = frozenset({6, 9, 12})  # additional information, delimiters and filling: nothing later depends on them


def length_size(extradata: bytes | None) -> int:
    """Bytes of the length before each unit, from the stream's header as MP4, MOV and Matroska have it (avcC); 0 if it
    is none."""
    return (extradata[4] & 3) + 1 if extradata and len(extradata) > 4 and extradata[0] == 1 else 0


def is_disposable(packet: bytes, prefix: int) -> bool:
    """Whether a packet holds one picture that no other picture refers to, and nothing else that matters.

    prefix: what `length_size` says, at least 1. False for anything that is not understood.
    """
    at, slices = 0, 0
    while at + prefix < len(packet):
        header = packet[at + prefix]
        if header & 31 in _SLICE:
            if header >> 5 & 3:  # nal_ref_idc
                return False
            slices += 1
        elif header & 31 not in _TELLS_NOTHING:
            return False
        at += prefix + int.from_bytes(packet[at : at + prefix], "big")
    return slices > 0 and at == len(packet)
