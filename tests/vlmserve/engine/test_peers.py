"""How servers name the layers of KV that they hand over."""

import pytest

from tests.tiny_checkpoints import HYBRID, STREAMED, make_checkpoint
from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.peers import _parts
from vlmserve.engine.rank_processes import rank_shard
from vlmserve.models.registry import outline_model


@pytest.mark.parametrize("family", [HYBRID, STREAMED])
def test_each_layer_of_the_cache_has_a_name_of_its_own(family, tmp_path):
    """Of both stages together, too: an MTP head has a layer, and with sparse attention an index."""
    mixers = ("linear_attention", "full_attention") * 2
    folder = make_checkpoint(family, tmp_path / "model", mtp=True, mixers=mixers)
    args, names = EngineArgs(model=str(folder), pp_size=2), []
    for stage in range(2):
        model = outline_model(folder, shard=rank_shard(args, stage), mtp=True)
        parts = _parts(args, model)
        assert len(parts) == model.config.num_kv_layers + len(model.further_kv)
        names += [part.layer for part in parts]
    assert len(set(names)) == len(names) == (6 if family == STREAMED else 3)
