"""The checkpoint folder on this machine that a model's name stands for."""

from __future__ import annotations

import re
from pathlib import Path

from vlmserve.config.engine_args import EngineArgs
from vlmserve_common.checkpoint.fields import Fields
from vlmserve_common.checkpoint.hf_config import read_hf_config, text_fields
from vlmserve_common.checkpoint.rope import context_length
from vlmserve_common.errors import CheckpointError, EngineError, SettingsError
from vlmserve_common.installing import hf

DEFAULT_MODEL = Path(__file__).resolve().parents[1] / "default_model"
"""The small trained checkpoint that comes with the package."""

DEFAULT_MODEL_NAME = "vlmserve-default"
"""The default model's name in the API."""


class NotDownloadedError(CheckpointError):
    """A model of the hub is not on this machine, and must not be downloaded."""


_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The hub library's errors by their names, in words that say what to do. The first ones are the user's to mend.
_USERS = {
    "RepositoryNotFoundError": "there is no such model, or it is private (`{hf} auth login`)",
    "RevisionNotFoundError": "the model has no such branch, tag or commit (setting --revision)",
    "GatedRepoError": "its terms are to be accepted on its page first (then `{hf} auth login`)",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and no copy is here",
}
_REASONS = _USERS | {
    "LocalEntryNotFoundError": "the hub does not answer, and no copy is here ({first})",
    "ConnectError": "the hub cannot be reached ({first})",
    "ConnectTimeout": "the hub cannot be reached ({first})",
}
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]


def local_folder(model: str) -> Path | None:
    """Return the folder that a model's name stands for without the hub; None for a hub id. "": the default model.

    Raises CheckpointError for what is neither.
    """
    if not model:
        return DEFAULT_MODEL
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if model.lower().endswith(".gguf"):
        raise CheckpointError(
            f"{model!r}: GGUF files cannot be read; take the model's folder of *.safetensors, or its hub id"
        )
    if path.exists():
        raise CheckpointError(f"{model!r} is a file; a checkpoint is a folder with config.json and *.safetensors")
    if model.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"there is no folder {model!r}")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id such as Qwen/Qwen3-VL-2B-Instruct")
    return None


def resolve_model(model: str, revision: str | None = None, *, download: bool = True) -> Path:
    """Return the folder of a checkpoint: `model` itself, or the downloaded `model` of the Hugging Face hub.

    revision: a branch, tag or commit of the hub's; folders have none. "": the default model. download: False raises
    NotDownloadedError instead of downloading. Raises CheckpointError, with the reason, if there is no such checkpoint,
    and EngineError if the hub does not answer.
    """
    if (folder := local_folder(model)) is not None:
        return folder
    from huggingface_hub import constants, snapshot_download

    try:
        return Path(snapshot_download(model, revision=revision, allow_patterns=_FILES, local_files_only=not download))
    except Exception as error:  # the library's errors have no common base that also covers the network's
        if not download:
            raise NotDownloadedError(f"{model!r} is no folder, and not downloaded from the Hugging Face hub") from None
        first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        name = "OfflineModeIsEnabled" if constants.HF_HUB_OFFLINE else type(error).__name__
        reason = _REASONS.get(name, "{first}").format(first=first.removeprefix("Got: "), hf=hf())
        raise (CheckpointError if name in _USERS else EngineError)(
            f"{model!r} is not a folder, and cannot be had from the Hugging Face hub: {reason}"
        ) from None


def check_model(folder: Path, max_model_len: int | None) -> None:
    """Check what needs config.json alone: the family, and --max-model-len. Raises CheckpointError or SettingsError."""
    config = Fields(read_hf_config(folder), f"{folder}: config.json")
    if max_model_len is not None:
        most = context_length(text_fields(config))
        if max_model_len > most:
            raise SettingsError(f"--max-model-len is {max_model_len}; the model was made for {most} tokens")


def checked_model(args: EngineArgs) -> Path:
    """Return the folder of a checkpoint after `check_model`. Errors: also those of `resolve_model`."""
    folder = resolve_model(args.model, args.revision)
    check_model(folder, args.max_model_len)
    return folder


def is_model(word: str, *, alone: bool) -> bool:
    """Return True if the first word of a command line is a model, and not something else. alone: it is the only word,
    and so no hub id."""
    path = Path(word).expanduser()
    is_hub_id = not alone and not path.exists() and _HUB_ID.fullmatch(word) is not None
    return is_hub_id or (path / "config.json").is_file()
