"""How large the frames of AV1 data are (AV1 Bitstream & Decoding Process Specification, sections 5.3 to 5.9)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_SEQUENCE_HEADER = 1
_FRAME_HEADERS = frozenset((3, 6, 7))  # OBU_FRAME_HEADER, OBU_FRAME, OBU_REDUNDANT_FRAME_HEADER
_KEY_FRAME, _SWITCH_FRAME = 0, 3
_CHOSEN_BY_FRAME = 2  # SELECT_SCREEN_CONTENT_TOOLS, SELECT_INTEGER_MV
_HEADER_BYTES = 512  # more than a sequence header can have, with 32 operating points of at most 89 bits


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sequence:
    """What a sequence header says; sizes in pixels. widest, highest: the most that a frame can state for itself."""

    width: int
    height: int
    widest: int
    highest: int
    reduced: bool
    presentation_time_bits: int  # 0: frames do not have it
    frame_id_bits: int
    screen_content: int
    integer_motion: int


class Unit(NamedTuple):
    """An open bitstream unit: its type and content."""

    kind: int
    content: memoryview


def av1_units(data: memoryview) -> Iterator[Unit]:
    """The open bitstream units (section 5.3) of AV1 data. Raises ValueError for data that are cut off."""
    at = 0
    while at < len(data):
        header = data[at]
        at += 2 if header & 0x04 else 1  # obu_extension_flag
        size = len(data) - at
        if header & 0x02:  # obu_has_size_field: leb128 (section 4.10.5)
            size = shift = 0
            more = True
            while more:
                if at >= len(data) or shift > 49:
                    raise ValueError("a unit's size is cut off")
                size |= (data[at] & 0x7F) << shift
                shift += 7
                more = data[at] >= 0x80
                at += 1
        if size < 0 or at + size > len(data):
            raise ValueError("a unit is cut off")
        yield Unit(header >> 3 & 0x0F, data[at : at + size])
        at += size


class FrameSizes:
    """Takes the units of one picture in their order, and says how large frames are.

    A sequence header gives the largest size; a frame may state its own, which decoders do not hold against that.
    """

    def __init__(self) -> None:
        self._sequence: _Sequence | None = None

    def size(self, unit: Unit) -> tuple[int, int] | None:
        """The most that the frame which begins here can have, in pixels: width and height. None: no frame begins.

        Raises ValueError for headers that are cut off, and a frame that no sequence header stands before.
        """
        if unit.kind == _SEQUENCE_HEADER:
            self._sequence = _read_sequence(_Bits(unit.content[:_HEADER_BYTES]))
        if unit.kind not in _FRAME_HEADERS:
            return None
        sequence = self._sequence
        if sequence is None:
            raise ValueError("no sequence header before a frame")
        if _states_its_size(_Bits(unit.content[:_HEADER_BYTES]), sequence):
            return sequence.widest, sequence.highest
        return sequence.width, sequence.height


class _Bits:
    """f(n) of section 4.10.2: numbers of n bits, the highest first."""

    def __init__(self, data: memoryview) -> None:
        self._value = int.from_bytes(data, "big")
        self._left = 8 * len(data)

    def __call__(self, count: int = 1) -> int:
        self._left -= count
        if self._left < 0:
            raise ValueError("a header is cut off")
        return self._value >> self._left & ((1 << count) - 1)

    def skip_variable(self) -> None:
        """uvlc() of section 4.10.3."""
        zeros = 0
        while not self():
            zeros += 1
        self(zeros if zeros < 32 else 0)


def _read_sequence(bits: _Bits) -> _Sequence:
    """sequence_header_obu() of section 5.5.1, as far as sizes and what stands before a frame's need it."""
    bits(3 + 1)  # seq_profile, still_picture
    reduced = bool(bits())
    presentation_time_bits = 0
    if reduced:
        bits(5)  # seq_level_idx[0]
    else:
        delay_bits = 0
        if bits():  # timing_info_present_flag
            bits(32 + 32)
            equal_intervals = bits()
            if equal_intervals:
                bits.skip_variable()
            if bits():  # decoder_model_info_present_flag
                delay_bits = bits(5) + 1
                bits(32 + 5)
                time_bits = bits(5) + 1
                presentation_time_bits = 0 if equal_intervals else time_bits
        display_delays = bits()
        for _ in range(bits(5) + 1):  # operating points
            bits(12)
            if bits(5) > 7:
                bits()  # seq_tier
            if delay_bits and bits():
                bits(2 * delay_bits + 1)
            if display_delays and bits():
                bits(4)
    width_bits, height_bits = bits(4) + 1, bits(4) + 1
    width, height = bits(width_bits) + 1, bits(height_bits) + 1
    frame_id_bits = 0
    if not reduced and bits():  # frame_id_numbers_present_flag
        frame_id_bits = bits(4) + 2
        frame_id_bits += bits(3) + 1
    screen_content = integer_motion = _CHOSEN_BY_FRAME
    if not reduced:
        bits(3 + 4)  # superblocks, intra tools; inter tools
        if bits():  # enable_order_hint
            bits(2)
        screen_content = _CHOSEN_BY_FRAME if bits() else bits()
        if screen_content:
            integer_motion = _CHOSEN_BY_FRAME if bits() else bits()
    return _Sequence(
        width=width,
        height=height,
        widest=1 << width_bits,
        highest=1 << height_bits,
        reduced=reduced,
        presentation_time_bits=presentation_time_bits,
        frame_id_bits=frame_id_bits,
        screen_content=screen_content,
        integer_motion=integer_motion,
    )


def _states_its_size(bits: _Bits, sequence: _Sequence) -> bool:
    """frame_size_override_flag of uncompressed_header(), section 5.9.2."""
    if sequence.reduced or bits():  # show_existing_frame
        return False
    kind = bits(2)
    shown = bits()
    if shown:
        bits(sequence.presentation_time_bits)
    else:
        bits()  # showable_frame
    if kind == _SWITCH_FRAME:
        return True
    if not (kind == _KEY_FRAME and shown):
        bits()  # error_resilient_mode
    bits()  # disable_cdf_update
    screen_content = bits() if sequence.screen_content == _CHOSEN_BY_FRAME else sequence.screen_content
    if screen_content and sequence.integer_motion == _CHOSEN_BY_FRAME:
        bits()  # force_integer_mv
    bits(sequence.frame_id_bits)
    return bool(bits())
