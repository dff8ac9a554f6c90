"""Reading checkpoint files: whole, sharded, broken."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from tests.tiny_checkpoints import write_safetensors
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.errors import CheckpointError

TENSORS = {
    "a": torch.arange(12, dtype=torch.float32).view(3, 4) / 7,
    "b": torch.arange(6, dtype=torch.float32).to(torch.bfloat16),
    "c": torch.randn(5, 3, 2, generator=torch.Generator().manual_seed(0)).half(),
    "empty": torch.zeros(0, 4),
}
FILE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def read_all(folder, dtype=None) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, in its own or another dtype."""
    reader = CheckpointReader(folder)
    out = {
        name: torch.full(stored.shape, float("nan"), dtype=dtype or stored.dtype)
        for name, stored in reader.tensors.items()
    }
    reader.read_into((reader.tensors[name], target) for name, target in out.items())
    return out


@pytest.mark.parametrize("shards", [1, 3])
@pytest.mark.parametrize("dtype", [None, torch.float32, torch.bfloat16, torch.float16])
def test_tensors_come_back_in_their_own_and_in_other_dtypes(tmp_path, shards, dtype):
    write_safetensors(tmp_path, TENSORS, shards)
    read = read_all(tmp_path, dtype)
    assert read.keys() == TENSORS.keys()
    for name, value in TENSORS.items():
        torch.testing.assert_close(read[name], value.to(dtype or value.dtype), rtol=0, atol=0)


def test_a_tensor_larger_than_the_conversion_buffer_is_cast_in_parts(tmp_path, monkeypatch):
    monkeypatch.setattr("vlmserve_common.checkpoint.reader._PART_BYTES", 64)
    value = torch.randn(7, 33, generator=torch.Generator().manual_seed(1))
    write_safetensors(tmp_path, {"a": value})
    torch.testing.assert_close(read_all(tmp_path, torch.bfloat16)["a"], value.bfloat16(), rtol=0, atol=0)


def test_tensors_go_into_parts_of_larger_ones(tmp_path):
    write_safetensors(tmp_path, TENSORS)
    reader = CheckpointReader(tmp_path)
    merged = torch.zeros(8, 4)
    reader.read_into([(reader.tensors["a"], merged[2:5])])
    assert torch.equal(merged[2:5], TENSORS["a"])
    assert not merged[:2].any()
    assert not merged[5:].any()


def test_a_single_file_is_preferred_to_an_index(tmp_path):
    write_safetensors(tmp_path, TENSORS)
    (tmp_path / INDEX).write_text("not even JSON")
    assert set(CheckpointReader(tmp_path).tensors) == set(TENSORS)


def test_a_single_file_may_be_one_of_several(tmp_path):
    first, second = {"a": torch.ones(2)}, {"b": torch.zeros(3)}
    save_file(first, tmp_path / FILE)
    save_file(second, tmp_path / "more.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": FILE, "b": "more.safetensors"}}))
    assert read_all(tmp_path).keys() == {"a", "b"}


def test_a_folder_without_weights_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match=f"neither {FILE} nor {INDEX}"):
        CheckpointReader(tmp_path)


def test_a_missing_shard_is_named_with_what_it_holds(tmp_path):
    write_safetensors(tmp_path, TENSORS, shards=2)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"model-00002-of-00002\.safetensors is missing; the index puts b, empty"):
        CheckpointReader(tmp_path)


def edit_index(folder, **changes) -> None:
    """Set entries of the weight map; None removes one."""
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"].update(changes)
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file is not None}
    (folder / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"z": "model-00001-of-00002.safetensors"}, "00001-of-00002.safetensors: z should be in it"),
        ({"a": None}, "00001-of-00002.safetensors: a is in it, and not in"),
        ({"a": "../elsewhere.safetensors"}, "no plain file name"),
        ({"a": 3}, "no plain file name"),
    ],
)
def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path, changes, message):
    write_safetensors(tmp_path, TENSORS, shards=2)
    edit_index(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


@pytest.mark.parametrize("kept", [0, 4, 8, 100, -1])
def test_truncated_files_are_refused_when_they_are_opened(tmp_path, kept):
    write_safetensors(tmp_path, TENSORS)
    data = (tmp_path / FILE).read_bytes()
    (tmp_path / FILE).write_bytes(data[:kept])
    with pytest.raises(CheckpointError, match=r"model\.safetensors: .*truncated"):
        CheckpointReader(tmp_path)


def test_a_file_that_shrinks_after_it_was_opened_is_refused(tmp_path):
    write_safetensors(tmp_path, TENSORS)
    reader = CheckpointReader(tmp_path)
    (tmp_path / FILE).write_bytes((tmp_path / FILE).read_bytes()[:-4])
    last = max(reader.tensors.values(), key=lambda stored: stored.start + (stored.name != "empty"))
    with pytest.raises(CheckpointError, match=f"truncated while {last.name} was read"):
        reader.read_into([(last, torch.empty(last.shape, dtype=last.dtype))])


def rewrite_header(folder, change) -> None:
    """Let `change` edit the header of the file's JSON."""
    data = (folder / FILE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    raw = json.dumps(header).encode()
    (folder / FILE).write_bytes(len(raw).to_bytes(8, "little") + raw + data[8 + length :])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: header["a"].update(shape=[3, 5]), r"a has shape \[3, 5\] but 48 bytes of F32"),
        (lambda header: header["a"].update(data_offsets=[-48, 0]), "a has shape"),
        (lambda header: header["a"].update(dtype="F8_E5M2"), "a is stored as F8_E5M2; supported are F32, BF16, F16"),
        (lambda header: header["a"].pop("shape"), "broken safetensors header"),
        (lambda header: header.update(a=[1]), "broken safetensors header"),
    ],
)
def test_broken_headers_are_refused(tmp_path, change, message):
    write_safetensors(tmp_path, TENSORS)
    rewrite_header(tmp_path, change)
    with pytest.raises(CheckpointError, match=message):
        CheckpointReader(tmp_path)


def test_a_file_that_is_something_else_is_refused(tmp_path):
    (tmp_path / FILE).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match="no safetensors file, or a truncated one"):
        CheckpointReader(tmp_path)


def test_metadata_is_no_tensor(tmp_path):
    save_file({"a": torch.zeros(1)}, tmp_path / FILE, metadata={"format": "pt"})
    assert set(CheckpointReader(tmp_path).tensors) == {"a"}


def test_json_files(tmp_path):
    (tmp_path / "good.json").write_text('{"a": "ü"}', encoding="utf-8")
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "bad.json").write_text("{")
    assert read_json(tmp_path, "good.json") == {"a": "ü"}
    assert read_json(tmp_path, "absent.json", required=False) == {}
    with pytest.raises(CheckpointError, match=r"has no absent\.json"):
        read_json(tmp_path, "absent.json")
    with pytest.raises(CheckpointError, match="not list"):
        read_json(tmp_path, "list.json")
    with pytest.raises(CheckpointError, match=r"bad\.json is not JSON: Expecting"):
        read_json(tmp_path, "bad.json")
