"""An entry's file: no byte of it can change, or be missing, without being noticed."""

from __future__ import annotations

import logging

import pytest
import torch
from safetensors.torch import load_file, safe_open

from tests.vision.store_helpers import HEADER, Clock, file_of, holds, key, open_store, rows
from vision.cache.entry_file import EmbedsFormat, entry_header

SMALL = {"count": 2, "width": 3}


@pytest.fixture
def store(tmp_path):
    logging.getLogger("vision.cache.store").setLevel(logging.ERROR)  # thousands of damaged files
    yield open_store(tmp_path, clock=Clock())
    logging.getLogger("vision.cache.store").setLevel(logging.NOTSET)


def assert_refused(store, path, content, what):
    path.write_bytes(content)
    before = store.stats()
    assert store.get(key(0)) is None, what
    assert not path.exists(), what
    after = store.stats()
    assert (after.misses, after.hits) == (before.misses + 1, before.hits), what


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_any_safetensors_tool_reads_it(store, tmp_path, dtype):
    assert store.put(key(0), rows(0, dtype=dtype))
    path = file_of(tmp_path, 0)
    assert torch.equal(load_file(path)["rows"], rows(0, dtype=dtype))
    with safe_open(path, "pt") as file:
        assert file.metadata()["key"] == key(0).hex()


def test_every_byte_is_checked(store, tmp_path):
    assert store.put(key(0), rows(0, **SMALL))
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    assert len(good) == HEADER + 12
    for place in range(len(good)):
        for bit in range(8) if place >= HEADER else (place % 8,):
            bad = bytearray(good)
            bad[place] ^= 1 << bit
            assert_refused(store, path, bad, f"bit {bit} of byte {place}")
    path.write_bytes(good)
    assert holds(store, 0, **SMALL)


def test_every_length_but_the_right_one_is_refused(store, tmp_path):
    assert store.put(key(0), rows(0, **SMALL))
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    for length in range(len(good)):
        assert_refused(store, path, good[:length], f"the first {length} bytes")
        assert_refused(store, path, good[:length] + bytes(len(good) - length), f"zeros from byte {length}")
    assert_refused(store, path, good + b"\0", "one byte more")
    assert_refused(store, path, good * 2, "twice the file")


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b'{"rows": {"dtype": "F32", "shape": [1]}}',
        b'{"rows": {"dtype": "F32", "shape": [true, true]}}',
        b'{"rows": {"dtype": "F32", "shape": [-1, -3]}}',
        b'{"rows": {"dtype": "F64", "shape": [1, 3]}}',
        b'{"rows": {"dtype": "F32", "shape": [4294967296, 4294967296]}}',
        b'{"rows": {"dtype": "F32", "shape": [1e999, 3]}}',
        b"[" * 504,
    ],
)
def test_any_other_file_is_refused(store, tmp_path, header):
    assert store.put(key(0), rows(0, **SMALL))
    content = (504).to_bytes(8, "little") + header.ljust(504) + bytes(12)
    assert_refused(store, file_of(tmp_path, 0), content, header)


@pytest.mark.parametrize("shape", [(-2, -3), (0, 3), (0, 0)])
def test_shapes_that_cannot_be_are_refused_under_a_right_checksum(store, tmp_path, shape):
    form = EmbedsFormat(dtype="F16", rows=shape[0], width=shape[1])
    data = bytes(form.nbytes)
    assert store.put(key(0), rows(0, **SMALL))
    assert_refused(store, file_of(tmp_path, 0), entry_header(key(0), form, memoryview(data)) + data, shape)


def test_a_file_under_another_key_is_refused(store, tmp_path):
    assert store.put(key(0), rows(0, **SMALL))
    assert store.put(key(1), rows(1, **SMALL))
    assert_refused(store, file_of(tmp_path, 0), file_of(tmp_path, 1).read_bytes(), "another key")
    assert holds(store, 1, **SMALL)


def test_a_damaged_entry_is_written_again(store, tmp_path):
    assert store.put(key(0), rows(0))
    path = file_of(tmp_path, 0)
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    assert store.put(key(0), rows(0))  # without a `get` before
    assert path.read_bytes() == good
    path.write_bytes(good[:-1])
    assert not holds(store, 0)
    assert store.put(key(0), rows(0))
    assert holds(store, 0)
