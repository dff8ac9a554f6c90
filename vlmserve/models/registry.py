"""Model families, and how a checkpoint becomes a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias, cast

import torch
from torch import nn

from vision.towers.loading import OF_THE_TOWER, make_tower
from vision.towers.no_tower import NoTower
from vlmserve.config.model_path import resolve_model
from vlmserve.models.config import ModelConfig, ModelDefaults, read_model_config
from vlmserve.models.kv_scales import KVScales
from vlmserve.models.mtp import HybridMTPHead
from vlmserve.models.qwen import (
    QWEN2_DEFAULTS,
    QWEN3_DEFAULTS,
    QWEN3_MOE_DEFAULTS,
    TEXT_DEFAULTS,
    TEXT_MOE_DEFAULTS,
    Qwen2Decoder,
    Qwen3Decoder,
)
from vlmserve.models.qwen3_5 import QWEN3_5_DEFAULTS, QWEN3_5_MOE_DEFAULTS, Qwen3_5Decoder
from vlmserve.models.qwen4_exp.decoder import QWEN4_EXP_DEFAULTS, Qwen4ExpDecoder
from vlmserve.models.qwen4_exp.mtp import StreamsMTPHead
from vlmserve.models.qwen4_exp.ngrams import read_stored_hashes, take_stored_tables
from vlmserve.models.vlm import OF_THE_MTP_HEAD, WEIGHT_RULES, LanguageModel, VisionLanguageModel
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.fp8 import Fp8Scheme
from vlmserve_common.checkpoint.gptq_awq import quantized_tensors
from vlmserve_common.checkpoint.hf_config import has_tower, read_hf_config, text_fields
from vlmserve_common.checkpoint.reader import CheckpointReader, StoredTensor, read_json
from vlmserve_common.checkpoint.schemes import Scheme, read_scheme
from vlmserve_common.checkpoint.weights import Update, match_weights, stored_tensors
from vlmserve_common.compute.communicator import ALONE, Communicator
from vlmserve_common.compute.experts import choose_layouts
from vlmserve_common.compute.linear import share_workspace
from vlmserve_common.compute.lora import AdapterLayout
from vlmserve_common.compute.shard import WHOLE, Shard
from vlmserve_common.compute.tensors import give_memory
from vlmserve_common.errors import CheckpointError, EngineError


@dataclass(frozen=True, kw_only=True)
class Family:
    """The classes of a family's decoder; its tower is in `vision.towers.loading`. mtp: of the head that guesses further
    tokens, if checkpoints may have one."""

    decoder: type[Qwen2Decoder] | type[Qwen3Decoder] | type[Qwen3_5Decoder] | type[Qwen4ExpDecoder]
    defaults: ModelDefaults
    mtp: type[HybridMTPHead] | type[StreamsMTPHead] | None = None


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2_vl": Family(decoder=Qwen2Decoder, defaults=QWEN2_DEFAULTS),
        "qwen2_5_vl": Family(decoder=Qwen2Decoder, defaults=QWEN2_DEFAULTS),
        "qwen3_vl": Family(decoder=Qwen3Decoder, defaults=QWEN3_DEFAULTS),
        "qwen3_vl_moe": Family(decoder=Qwen3Decoder, defaults=QWEN3_MOE_DEFAULTS),
        "qwen3_5": Family(decoder=Qwen3_5Decoder, defaults=QWEN3_5_DEFAULTS, mtp=HybridMTPHead),
        "qwen3_5_moe": Family(decoder=Qwen3_5Decoder, defaults=QWEN3_5_MOE_DEFAULTS, mtp=HybridMTPHead),
        "qwen4_exp": Family(decoder=Qwen4ExpDecoder, defaults=QWEN4_EXP_DEFAULTS, mtp=StreamsMTPHead),
        "qwen2_5_omni": Family(decoder=Qwen2Decoder, defaults=QWEN2_DEFAULTS),
        "qwen3_omni_moe": Family(decoder=Qwen3Decoder, defaults=QWEN3_MOE_DEFAULTS),
    }
)


def _text(defaults: ModelDefaults) -> ModelDefaults:
    """Return those of a model that only has texts, whose positions are the same in time, height and width."""
    return replace(defaults, mrope_section=None)


TEXT_FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(decoder=Qwen2Decoder, defaults=TEXT_DEFAULTS),
        "qwen3": Family(decoder=Qwen3Decoder, defaults=TEXT_DEFAULTS),
        "qwen3_moe": Family(decoder=Qwen3Decoder, defaults=TEXT_MOE_DEFAULTS),
        "qwen3_5_text": Family(decoder=Qwen3_5Decoder, defaults=_text(QWEN3_5_DEFAULTS), mtp=HybridMTPHead),
        "qwen3_5_moe_text": Family(decoder=Qwen3_5Decoder, defaults=_text(QWEN3_5_MOE_DEFAULTS), mtp=HybridMTPHead),
    }
)
"""Models without a tower."""


def load_config(folder: Path, shard: Shard = WHOLE, *, mtp: bool = False, embeds_last: bool = False) -> ModelConfig:
    """Return the configuration of a checkpoint folder, for one part of the model. mtp, embeds_last and errors: those of
    `load_model`."""
    return _model_config(folder, read_hf_config(folder), shard, mtp=mtp, embeds_last=embeds_last)


def outline_model(
    folder: Path,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    *,
    shard: Shard = WHOLE,
    mtp: bool = False,
    embeds_last: bool = False,
    without_weights: bool = False,
) -> VisionLanguageModel:
    """Make the model of a checkpoint folder without its weights, on the meta device: it has sizes, and no memory.

    dtype, device, mtp, embeds_last, errors: those of `load_model`. On the meta device, no weight is quantised. shard:
    the part of the model. Tensors are found, and not read. without_weights: the folder need not have them.
    """
    hf_config = read_hf_config(folder)
    config = _model_config(folder, hf_config, shard, mtp=mtp, embeds_last=embeds_last)
    dtype = _dtype(folder, hf_config, config, torch.device(device), dtype)
    model = _outline(hf_config, config, dtype, Communicator(shard))
    if not without_weights:
        _Tensors(CheckpointReader(folder), hf_config, model, torch.device(device)).match()
    return model


class WeightUpdates:
    """What may replace the weights of a model that was loaded from `folder`; without_weights: which has only their
    sizes. CheckpointError if its weights cannot be replaced."""

    def __init__(self, folder: Path, model: VisionLanguageModel, *, without_weights: bool) -> None:
        self._model, self._hf_config = model, read_hf_config(folder)
        self._dtypes: dict[str, torch.dtype] = {}
        if without_weights:
            return
        reader, rules = CheckpointReader(folder), model.language_model.layers.rules(WEIGHT_RULES)
        if quantization_of(folder, self._hf_config) is not None or KVScales(reader, rules).stored:
            raise CheckpointError(f"{folder}: quantised weights, and scales of keys and values, cannot be replaced")
        self._dtypes = {rules.our_name(name): stored.dtype for name, stored in reader.tensors.items()}

    def check_config(self, folder: Path) -> None:
        """CheckpointError unless a checkpoint folder is of the same family and sizes, as far as it says so."""
        if not (folder / "config.json").is_file():
            return
        theirs, ours = read_hf_config(folder), self._hf_config
        pairs = {"model_type": (theirs["model_type"], ours["model_type"])}
        if theirs["model_type"] == ours["model_type"]:
            config, own = asdict(_model_config(folder, theirs)), asdict(self._model.whole_config)
            pairs |= {name: (config[name], own[name]) for name in own.keys() - _MAY_DIFFER}
            pairs |= {name: (theirs.get(name), ours.get(name)) for name in ("vision_config", "quantization_config")}
        found = [f"{name} is {one!r}, not {two!r}" for name, (one, two) in sorted(pairs.items()) if one != two]
        if found:
            raise CheckpointError(f"{folder} is another model than the one that is served: {'; '.join(found)}")

    @property
    def all_names(self) -> frozenset[str]:
        """Our names of all tensors that the model has, in this process or in another one."""
        return frozenset(name for name, _ in stored_tensors(self._outline()))

    def names(self, source: CheckpointReader) -> frozenset[str]:
        """Return our names of the tensors of an update."""
        return frozenset(map(self._model.language_model.layers.rules(WEIGHT_RULES).our_name, source.tensors))

    def match(self, source: CheckpointReader, *, is_part: bool, with_tower: bool = True) -> tuple[nn.Module, Matched]:
        """Match the tensors of an update with the parameters of an outline of the model, which is returned, too.

        is_part: they need not be all. with_tower: False passes the tower's tensors over. CheckpointError for tensors
        that are missing, unexpected, or of another shape or dtype than those of the checkpoint that is served.
        """
        outline = self._outline()
        tensors = _Tensors(source, self._hf_config, outline, torch.device("cpu"), with_tower=with_tower)
        return outline, tensors.match(Update(dtypes=self._dtypes, dtype=self._model.dtype, is_part=is_part))

    def _outline(self) -> VisionLanguageModel:
        model = self._model
        return _outline(self._hf_config, model.whole_config, model.dtype, Communicator(model.comm.shard))


Matched: TypeAlias = list[tuple[StoredTensor, torch.Tensor]]
# of a configuration: what says nothing about weights, and what is of this process
_MAY_DIFFER = frozenset({"context_length", "dtype", "embeds_last", "eos_token_ids", "mtp_layers", "shard"})


def load_model(
    path: str | Path,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    *,
    with_tower: bool = True,
    keep_fp8: bool | None = None,
    comm: Communicator = ALONE,
    mtp: bool = False,
    embeds_last: bool = False,
) -> VisionLanguageModel:
    """Make a model on `device` and fill it from a checkpoint folder or hub id.

    dtype: computed in; by default the checkpoint's own, or bfloat16 for quantised weights of float16 on a CPU.
    with_tower: see `make_model`; without it, the tower's tensors are passed over. Quantised weights are packed at once.
    keep_fp8: whether 8-bit floats stay 8-bit, and inputs are rounded to them; by default if the device multiplies them.
    comm: the part of the decoder that this process has, and its connections; only this part is read. mtp: whether the
    head that guesses further tokens is read, too. embeds_last: see `ModelConfig`; an MTP head always needs it.

    Raises CheckpointError when the family is unknown, the configuration impossible, or a tensor missing, unexpected or
    misshaped. EngineError for a model that cannot be shared in this way.
    """
    folder, device = resolve_model(str(path)), torch.device(device)
    hf_config = read_hf_config(folder)
    config = _model_config(folder, hf_config, comm.shard, mtp=mtp, embeds_last=embeds_last)
    dtype = _dtype(folder, hf_config, config, device, dtype)
    model = _outline(hf_config, config, dtype, comm)
    reader = CheckpointReader(folder)
    tensors = _Tensors(reader, hf_config, model, device, with_tower=with_tower, keep_fp8=keep_fp8)
    _commit(model, device, with_tower=with_tower)
    tensors.load()
    return model


def _dtype(
    folder: Path, hf_config: Mapping[str, Any], config: ModelConfig, device: torch.device, asked: torch.dtype | None
) -> torch.dtype:
    """Return the dtype that a model is computed in."""
    if asked is not None or config.dtype != torch.float16 or device.type != "cpu":
        return asked or config.dtype
    # float16 is what GPUs of their time wanted; only bfloat16 has operators here
    return torch.bfloat16 if isinstance(quantization_of(folder, hf_config), Scheme) else config.dtype


def adapter_layouts(
    folder: Path, model: VisionLanguageModel, *, without_weights: bool = False
) -> tuple[AdapterLayout, AdapterLayout]:
    """Return where adapters go in this process's part of the model of a checkpoint folder, and in all of it. The
    model's weights may be packed by now. without_weights: the folder need not have any."""
    shard = model.comm.shard
    own, *whole = (
        AdapterLayout.of(
            outline_model(folder, model.dtype, "meta", shard=one, without_weights=without_weights), WEIGHT_RULES
        )
        for one in ([shard] if shard.is_whole and shard.stage.size == 1 else [shard, WHOLE])
    )
    return own, whole[0] if whole else own


def load_draft_model(
    folder: Path, target: ModelConfig, device: torch.device | str, dtype: torch.dtype
) -> LanguageModel:
    """Make a smaller model that guesses for `target`, computes in `dtype`, and may have no tower. On the meta device,
    make its outline.

    Raises CheckpointError as `load_model` does, for recurrent layers, and for a tower that takes other pictures than
    the target's family.
    """
    hf_config, device = read_hf_config(folder), torch.device(device)
    config = _model_config(folder, hf_config)
    if config.linear is not None:
        raise CheckpointError(f"{folder}: a {config.family} cannot guess for others, as it has recurrent layers")
    if config.family in FAMILIES and config.family.removesuffix("_moe") != target.family.removesuffix("_moe"):
        raise CheckpointError(
            f"{folder}: a {config.family} cannot guess for a {target.family}, whose pictures have other tokens"
        )
    model: LanguageModel
    if config.family in FAMILIES:
        model = _outline(hf_config, config, dtype, ALONE)
    else:
        with torch.device("meta"):
            decoder = TEXT_FAMILIES[config.family].decoder(config, dtype, ALONE)
            model = LanguageModel(config, decoder, dtype, ALONE).to(dtype)
    tensors = _Tensors(CheckpointReader(folder), hf_config, model, device)
    if device.type == "meta":
        tensors.match()
        return model
    _commit(model, device)
    tensors.load()
    return model


class _Tensors:
    """A checkpoint's tensors, for a model that is on the meta device still."""

    def __init__(
        self,
        reader: CheckpointReader,
        hf_config: Mapping[str, Any],
        model: LanguageModel,
        device: torch.device,
        *,
        with_tower: bool = True,
        keep_fp8: bool | None = None,
    ) -> None:
        self._reader, self._rules = reader, model.language_model.layers.rules(WEIGHT_RULES)
        self._decoder, self._module = model.language_model, cast(nn.Module, model)
        if not with_tower:
            parts = {name: part for name, part in model.named_children() if name != "visual"}
            self._module = nn.ModuleDict(parts)
            self._rules = replace(self._rules, ignored=(*self._rules.ignored, OF_THE_TOWER))
        if isinstance(model, VisionLanguageModel) and model.mtp is not None:
            if not any(name.startswith("mtp.layers.") for name in self._reader.tensors):
                raise CheckpointError(f"{reader.folder}: {_NO_MTP}, there are no tensors mtp.layers.*")
            # whatever of the head is not known here must not be passed over
            ignored = tuple(pattern for pattern in self._rules.ignored if pattern != OF_THE_MTP_HEAD)
            self._rules = replace(self._rules, ignored=ignored)
        shapes = {self._rules.our_name(name): stored.shape for name, stored in self._reader.tensors.items()}
        choose_layouts(self._module, shapes)
        take_stored_tables(self._module, shapes)
        self._kv_scales = KVScales(self._reader, self._rules)
        scheme = quantization_of(reader.folder, hf_config)
        self._quantized = quantized_tensors(
            self._module, self._reader, self._rules, scheme, device=device, keep_fp8=keep_fp8
        )

    def match(self, update: Update | None = None) -> Matched:
        """Match them with the tensors to fill. CheckpointError for missing, unexpected or misshaped tensors."""
        return match_weights(
            self._module,
            self._reader,
            self._rules,
            otherwise=self._quantized.weights,
            passed_over=self._quantized.stored | self._kv_scales.stored,
            eight_bit=self._quantized.eight_bit,
            update=update,
        )

    def load(self) -> None:
        """Fill the module, which has memory by now."""
        self._reader.read_into(self.match())
        self._quantized.load()
        self._kv_scales.fold_into(self._decoder)
        read_stored_hashes(self._module, self._reader, self._rules)


def quantization_of(folder: Path, hf_config: Mapping[str, Any] | None = None) -> Scheme | Fp8Scheme | None:
    """Return how a checkpoint folder's weights are quantised, None if they are not. CheckpointError for unsupported
    ways."""
    try:
        return read_scheme(read_hf_config(folder) if hf_config is None else hf_config)
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error


def make_model(
    hf_config: Mapping[str, Any],
    config: ModelConfig,
    device: torch.device,
    dtype: torch.dtype,
    *,
    with_tower: bool = True,
    comm: Communicator | None = None,
) -> VisionLanguageModel:
    """Make an uninitialised model of a known family. On a CPU, its memory is committed as it is filled.

    with_tower: False keeps the tower on the meta device, because pictures are encoded elsewhere. comm: of the part that
    `config` names; None makes a part that never computes together with other processes.
    """
    model = _outline(hf_config, config, dtype, comm or Communicator(config.shard))
    _commit(model, device, with_tower=with_tower)
    return model


def _commit(model: LanguageModel, device: torch.device, *, with_tower: bool = True) -> None:
    for name, part in model.named_children():
        if with_tower or name != "visual":
            give_memory(part, device)
    model.eval()
    # one buffer for the tower and one for the rest
    share_workspace(model)
    if isinstance(model, VisionLanguageModel):
        share_workspace(model.visual)


def _outline(
    hf_config: Mapping[str, Any], config: ModelConfig, dtype: torch.dtype, comm: Communicator
) -> VisionLanguageModel:
    with torch.device("meta"):
        family, sees = _family(config.family), has_tower(hf_config)
        tower = make_tower(hf_config, dtype, "meta") if sees else NoTower(dtype)
        mtp = family.mtp(config, dtype, comm) if config.of_part().mtp_layers and family.mtp is not None else None
        return VisionLanguageModel(config, tower, family.decoder(config, dtype, comm), dtype, comm, mtp).to(dtype)


def _family(name: str) -> Family:
    return FAMILIES.get(name) or TEXT_FAMILIES[name]


_NO_MTP = "--speculative-algorithm mtp needs a checkpoint with an MTP head"


def _model_config(
    folder: Path,
    hf_config: Mapping[str, Any],
    shard: Shard = WHOLE,
    *,
    mtp: bool = False,
    embeds_last: bool = False,
) -> ModelConfig:
    family = _family(hf_config["model_type"])
    try:
        generation = read_json(folder, "generation_config.json", required=False)
        config = read_model_config(hf_config, generation, family.defaults)
        if mtp:
            config = replace(config, mtp_layers=_mtp_layers(hf_config, family))
    except CheckpointError as error:
        raise CheckpointError(f"{folder}: {error}") from error
    if shard.experts.ep_size > 1 and config.experts is None:
        raise EngineError(f"--ep-size is {shard.experts.ep_size}: {config.family} models have no experts")
    return replace(config, shard=shard, embeds_last=mtp or embeds_last)


def _mtp_layers(hf_config: Mapping[str, Any], family: Family) -> int:
    """Return the layers of the head that guesses, which is 1. CheckpointError for another number, or a head with an
    embedding of its own."""
    text = text_fields(Fields(hf_config, "config.json"))
    layers = text.integer("mtp_num_hidden_layers", 0)
    if family.mtp is None or not layers:
        which = ", ".join(name for name, one in FAMILIES.items() if one.mtp is not None)
        raise CheckpointError(f"{_NO_MTP} ({which}), and this {hf_config['model_type']} has none")
    text.allow("mtp_num_hidden_layers", layers, (1,))
    text.allow("mtp_use_dedicated_embeddings", text.flag("mtp_use_dedicated_embeddings", False), (False,))
    return layers
