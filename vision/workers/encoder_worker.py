"""An encoder worker: a process with a tower on its device, which encodes one batch after the other."""

from __future__ import annotations

from collections.abc import Callable

import torch

from vision.towers.blocks import VisionTower
from vision.towers.loading import joined_fingerprint, load_tower, rewrite_tower, tower_adapters, tower_fingerprint
from vision.towers.runner import TowerRunner
from vision.towers.temporal_patch import EncodeBatch
from vision.towers.tower_graphs import capture_on_gpu
from vision.workers.backend import attempt
from vision.workers.cuda_rows import share, trial_rows
from vision.workers.encoder_messages import EncodeDone, LentRows, TowerChange, TowerChanged, encoder_channel
from vision.workers.settings import WorkerSettings
from vlmserve_common.checkpoint.given import reader_of
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.checkpoint.reader import CheckpointReader
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.compute.linear import pack_linears
from vlmserve_common.compute.tensors import dtype_setting, to_array
from vlmserve_common.kernels import fused
from vlmserve_common.kernels.library import activate, torch_threads
from vlmserve_common.kernels.quantized import tower_mode
from vlmserve_common.process.child import Parent
from vlmserve_common.transport.shm import SharedArrays
from vlmserve_common.transport.wire import MessageChannel


def run_worker(parent: Parent, settings: WorkerSettings, device_name: str) -> None:
    """Load the tower, report its fingerprint, and encode batches. The process ends with its parent (see
    `process.child`)."""
    torch.set_num_threads(settings.threads)
    device = torch.device(device_name)
    if device.type == "cpu":
        activate(settings.cpu_kernels, threads=settings.threads)
    else:
        torch.cuda.set_device(device)
        fused.activate(settings.gpu_kernels, device)
    towers: list[VisionTower] = []
    adapters: AdapterStore | None = None
    fingerprints, mode = [], tower_mode(settings.quantization, device)
    for folder in [settings.model, *([settings.second] if settings.second is not None else [])]:
        # the second one computes in the first one's dtype
        dtype = next(towers[0].parameters()).dtype if towers else dtype_setting(settings.dtype)
        tower = load_tower(folder, device=device, dtype=dtype)
        fingerprints.append(tower_fingerprint(tower, read_hf_config(folder)["vision_config"], mode))
        if settings.max_lora_rank and not towers:
            adapters = tower_adapters(tower, max_rank=settings.max_lora_rank, most=settings.max_loaded_loras)
        pack_linears(tower, mode)
        if device.type != "cpu" and settings.cuda_graphs:
            capture_on_gpu(tower, device)
        towers.append(tower)
    if device.type == "cpu":
        torch.set_num_threads(torch_threads(settings.threads, next(towers[0].parameters()).dtype))
    runner = TowerRunner(towers[0], device, *towers[1:], adapters=adapters)
    fingerprint = joined_fingerprint(fingerprints)
    channel = encoder_channel(parent.send, parent.receive, SharedArrays(settings.shared_dir))
    lent = LentRows(channel, share)
    offer = lent.offer(lambda: trial_rows(device)) if settings.may_lend(device_name) else None
    parent.ready({"fingerprint": fingerprint.hex()})
    if offer is not None:
        lent.agree(offer)
    while True:
        done = _answer_next(runner, channel, lent, lambda source: rewrite_tower(towers[0], settings.model, source))
        if not done and device.type == "cuda":
            # After some errors a process cannot use its GPU any more. Then this raises, and a new worker is started.
            torch.cuda.synchronize(device)


def _answer_next(
    runner: TowerRunner,
    channel: MessageChannel,
    lent: LentRows[torch.Tensor],
    rewrite: Callable[[CheckpointReader], None],
) -> bool:
    """Encode the next batch, or rewrite the tower; return True if that succeeded."""
    work = lent.receive_work()
    if isinstance(work, TowerChange):
        source = work.source
        _, error = attempt(lambda: rewrite(reader_of(source)))
        channel.send(channel.encode(TowerChanged(error=error)))
        return not error
    encoded, error = attempt(lambda: _encode(runner, work, lent))
    channel.send(channel.encode(encoded or EncodeDone(number=work.number, error=error)))
    return encoded is not None


def _encode(runner: TowerRunner, work: EncodeBatch, lent: LentRows[torch.Tensor]) -> EncodeDone:
    packed = runner.encode_packed(work.patches)
    row_counts = runner.row_counts(work.patches)
    if lent.agreed:
        rows = packed if packed.untyped_storage().nbytes() == packed.nbytes else packed.clone()
        return EncodeDone(number=work.number, lent=lent.lend(work.number, rows, row_counts))
    arrays = [to_array(rows) for rows in packed.cpu().split(row_counts)]
    return EncodeDone(number=work.number, rows=tuple(rows for rows, _ in arrays), dtype=arrays[0][1])
