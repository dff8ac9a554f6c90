"""A part of a model: what it has of the whole, and what of the checkpoint it reads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny_checkpoints import FAMILIES, make_checkpoint
from vlmserve.models import registry
from vlmserve.models.registry import load_model
from vlmserve_common.checkpoint import reader, stream
from vlmserve_common.checkpoint.weights import stored_cuts, stored_tensors
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.shard import Shard
from vlmserve_common.errors import CheckpointError

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, INNER, VOCAB = 4, 2, {"qwen3_vl": 32}, 64, 96, 448


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize("size", [2, 4])
def test_parts_have_their_share_of_every_product_and_nothing_else(folder: Path, size: int):
    whole = dict(stored_tensors(load_model(folder)))
    head_dim = HEAD_DIM.get(folder.name[:8], HIDDEN // HEADS)
    seen = {name: torch.zeros(tensor.shape, dtype=torch.int64) for name, tensor in whole.items()}
    for rank in range(size):
        part = load_model(folder, comm=Communicator(Shard(rank, size)))
        cuts = stored_cuts(part)
        for name, tensor in stored_tensors(part):
            count, expected = seen[name], whole[name]
            if name in cuts:
                cut = cuts[name]
                count, expected = (one.narrow(cut.dim, cut.start, cut.size) for one in (count, expected))
            assert torch.equal(tensor, expected), name
            count += 1
        layer = part.language_model.layers[0]
        heads, kv_heads = HEADS // size, max(1, KV_HEADS // size)
        assert layer.self_attn.qkv_proj.weight.shape == ((heads + 2 * kv_heads) * head_dim, HIDDEN)
        assert layer.self_attn.o_proj.weight.shape == (HIDDEN, heads * head_dim)
        assert layer.mlp.gate_up_proj.weight.shape == (2 * INNER // size, HIDDEN)
        assert layer.mlp.down_proj.weight.shape == (HIDDEN, INNER // size)
        assert part.language_model.embed_tokens.weight.shape == (VOCAB // size, HIDDEN)
        assert (part.config.num_heads, part.config.num_kv_heads) == (heads, kv_heads)
    for name, count in seen.items():
        split = any(kind in name for kind in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "embed_tokens"))
        split = (split or "lm_head" in name) and "visual" not in name and not name.endswith("o_proj.bias")
        kv = "k_proj" in name or "v_proj" in name
        assert torch.all(count == (1 if split else size // KV_HEADS if kv else size)), name


def test_a_part_reads_its_rows_only_and_is_never_whole(folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Of weights that are cut by columns whole rows are read, a small piece at a time."""
    monkeypatch.setattr(reader, "_PART_BYTES", 4096)
    wanted: dict[str, int] = {}
    largest = 0
    run = stream.Stream.run

    def watched(self: stream.Stream, parts, done):
        parts = list(parts)
        wanted.update({part.stored.name: wanted.get(part.stored.name, 0) + part.size for part in parts})
        run(self, parts, done)
        nonlocal largest
        largest = max([largest, *(slot.buffer.nbytes for slot in self._ring)])

    monkeypatch.setattr(stream.Stream, "run", watched)
    whole = {name: tensor.nbytes for name, tensor in stored_tensors(load_model(folder))}
    wanted.clear()
    part = load_model(folder, comm=Communicator(Shard(1, 2)), with_tower=False)
    ours = {registry.WEIGHT_RULES.our_name(name): size for name, size in wanted.items()}
    cuts = stored_cuts(part)
    for name, size in ours.items():
        rows_cut = name in cuts and cuts[name].dim == 0
        assert size == whole[name] // (2 if rows_cut else 1), name
    assert largest <= 4096
    held = sum(parameter.nbytes for parameter in part.language_model.parameters())
    all_of_it = sum(size for name, size in whole.items() if name.startswith("language_model"))
    assert held < 0.6 * all_of_it


def test_a_vocabulary_that_does_not_divide_is_padded():
    shards = [Shard(rank, 4).cut_vocab(10) for rank in range(4)]
    assert [(cut.start, cut.size, rows) for cut, rows in shards] == [(0, 3, 3), (3, 3, 3), (6, 3, 3), (9, 1, 3)]


def test_key_value_heads_are_split_or_had_by_several():
    assert [Shard(rank, 2).cut_kv(4, 8).start for rank in range(2)] == [0, 16]
    assert [Shard(rank, 4).cut_kv(2, 8).start for rank in range(4)] == [0, 0, 8, 8]


def test_a_wrong_shape_is_told_in_the_checkpoint_s_own_numbers(folder: Path, tmp_path: Path):
    config = (folder / "config.json").read_text().replace('"intermediate_size": 96', '"intermediate_size": 90')
    for file in folder.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"down_proj.weight is \[64, 96\], not \[64, 90\]"):
        load_model(tmp_path, comm=Communicator(Shard(1, 2)))
