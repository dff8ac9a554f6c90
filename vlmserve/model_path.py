"""From what the user calls a model to a checkpoint folder on this machine."""

from __future__ import annotations

import re
from pathlib import Path

from vlmserve.common.errors import CheckpointError

DEFAULT_MODEL = Path(__file__).resolve().parent / "default_model"
"""The small trained checkpoint that comes with the package."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
# The hub library's errors by their names, in words that say what to do.
_REASONS = {
    "RepositoryNotFoundError": "there is no such model, or it is private (`hf auth login`)",
    "GatedRepoError": "its terms are to be accepted on its page first (then `hf auth login`)",
    "LocalEntryNotFoundError": "the hub does not answer, and no copy is here ({first})",
    "OfflineModeIsEnabled": "HF_HUB_OFFLINE is set, and no copy is here",
    "ConnectError": "the hub cannot be reached ({first})",
    "ConnectTimeout": "the hub cannot be reached ({first})",
}
_FILES = ["*.safetensors", "*.json", "*.jinja", "*.txt"]


def resolve_model(model: str) -> Path:
    """The folder of a checkpoint: `model` itself, or where the Hugging Face hub's `model` was downloaded to.

    "": the default model. Raises CheckpointError, with the reason, when it is neither.
    """
    if not model:
        return DEFAULT_MODEL
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists():
        raise CheckpointError(f"{model!r} is a file; a checkpoint is a folder with config.json and *.safetensors")
    if model.startswith(("/", "./", "../", "~")):
        raise CheckpointError(f"there is no folder {model!r}")
    if not _HUB_ID.fullmatch(model):
        raise CheckpointError(f"{model!r} is neither a folder nor a hub id such as Qwen/Qwen3-VL-2B-Instruct")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(model, allow_patterns=_FILES))
    except Exception as error:  # the library's errors have no common base that also covers the network's
        first = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        reason = _REASONS.get(type(error).__name__, "{first}").format(first=first.removeprefix("Got: "))
        raise CheckpointError(
            f"{model!r} is not a folder, and cannot be had from the Hugging Face hub: {reason}"
        ) from None
