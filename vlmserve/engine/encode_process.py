"""The process of an encoder (`--role encode`): the vision tower alone, which encodes for other servers."""

from __future__ import annotations

import logging
import socket
from functools import partial
from pathlib import Path
from typing import get_args

import torch

from vision.encoder_pool import EncoderPool
from vision.remote.encode_service import EncodeService, PixelsOnDemand
from vision.remote.encoder_server import EncoderServer
from vision.remote.protocol import RENEW_S
from vision.towers.blocks import VisionTower
from vision.towers.loading import load_tower, outline_tower, tower_adapters
from vision.towers.tower_graphs import capture_on_gpu
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.model_path import resolve_model
from vlmserve.engine.encoder import build_backend, embed_shape, make_pool, tower_identity
from vlmserve.engine.model_loading import prepare_device
from vlmserve.engine.process import Ending
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import FINISH_S, Ready
from vlmserve.ipc.control_messages import ControlRefused, ControlRequest, ControlResult, GetServerInfoReq, ServerInfo
from vlmserve.ipc.messages import SchedulerInput, SchedulerStats
from vlmserve.ipc.sockets import ControlServer, Receiver
from vlmserve.memory.sizing import embeds_bytes
from vlmserve_common.checkpoint.hf_config import read_hf_config
from vlmserve_common.compute.memory import free_memory
from vlmserve_common.compute.tensors import dtype_name, dtype_setting
from vlmserve_common.errors import EngineError
from vlmserve_common.kernels.library import torch_threads
from vlmserve_common.transport.addresses import is_loopback, split_tcp_url

log = logging.getLogger(__name__)

_SLICE_S = 0.05
"""The time that the tower gets before messages are looked at again."""


def run_encoder(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    """Run the encoder's process until its parent ends it. It answers consumers and the operators' questions."""
    listener = _listen(args.encoder_listen)  # first: a taken port is known before weights are read
    device, threads = prepare_device(args, None)
    towers = _load_towers(args, device)
    dtype = next(towers[0].parameters()).dtype
    if device.type == "cpu":
        torch.set_num_threads(torch_threads(threads, dtype))
    adapters = None
    if args.enable_lora and not args.num_encoders:  # encoder processes have their own
        adapters = tower_adapters(towers[0], max_rank=args.max_lora_rank, most=args.max_loaded_loras)
    home, fingerprint = build_backend(args, *towers, dtype=dtype, device=device, start=start, adapters=adapters)
    backend, shape = PixelsOnDemand(home), embed_shape(towers[0], dtype, *towers[1:])
    server = EncoderServer(listener, tower_identity(args, fingerprint, shape), args.peer_key)
    space = embeds_bytes(args, row_bytes=shape.width * dtype.itemsize, free=free_memory(device)[0])
    pool = make_pool(
        args,
        backend,
        fingerprint,
        shape,
        device=device,
        space_bytes=space,
        link_stats=lambda: service.stats(),
    )
    service = EncodeService(pool, backend, server, takes_adapters=args.enable_lora, folder=args.allowed_lora_path)
    # nothing comes there: the API process has requests for schedulers only
    receiver = Receiver(channels.scheduler, get_args(SchedulerInput))
    operators = ControlServer(channels.control)
    answer = partial(_answer, pool=pool, device=str(device), dtype=dtype_name(dtype), url=server.url)
    heartbeat = channels.heartbeat("encoder")
    ending = Ending(FINISH_S)
    ready(before_end=partial(_finish, pool, ending))
    if args.peer_key is None and not is_loopback(listener.getsockname()[0]):
        log.warning(
            "--encoder-listen is %s, and there is no --peer-key: everyone who reaches this address may use the encoder",
            args.encoder_listen,
        )
    log.info("encodes for servers with --encoder-urls %s", server.url)
    busy = False
    while not ending.has_come:
        if not busy:
            heartbeat.idle()
            receiver.drain(timeout_s=RENEW_S, wake=[operators.socket, ending.fd, *service.wait_handles()])
        heartbeat.working()
        busy = service.step(_SLICE_S)
        operators.answer_all(answer)
    server.close()
    ending.finish()


def _load_towers(args: EngineArgs, device: torch.device) -> list[VisionTower]:
    """Load the tower, and that of a model that guesses; on the meta device if encoder processes load them."""
    folders = [Path(args.model)]
    if args.speculative_algorithm == "draft_model" and args.speculative_draft_model_path is not None:
        second = resolve_model(args.speculative_draft_model_path)
        folders += [second] if "vision_config" in read_hf_config(second) else []
    towers: list[VisionTower] = []
    for folder in folders:
        dtype = next(towers[0].parameters()).dtype if towers else dtype_setting(args.dtype)
        if args.num_encoders:
            towers.append(outline_tower(folder, dtype=dtype))
        else:
            towers.append(load_tower(folder, device=device, dtype=dtype))
            if device.type == "cuda" and not args.disable_vit_cuda_graph:
                capture_on_gpu(towers[-1], device)
    return towers


def _listen(place: str) -> socket.socket:
    host, port = split_tcp_url(f"tcp://{place}")
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise EngineError(f"cannot listen at --encoder-listen {place}: {error.strerror or error}") from None


def _answer(question: ControlRequest, *, pool: EncoderPool, device: str, dtype: str, url: str) -> ControlResult:
    """Answer a question of operators; an encoder describes itself, and nothing else."""
    if not isinstance(question, GetServerInfoReq):
        return ControlRefused(message="an encoder (--role encode) has nothing of this kind")
    stats = SchedulerStats(encoder=pool.stats())
    return ServerInfo(stats=stats, paused=False, profiling=False, device=device, dtype=dtype, urls=(url,))


def _finish(pool: EncoderPool, ending: Ending) -> None:
    """Write embeddings to disk, in the thread that is told of the end."""
    ending.tell()
    if lost := pool.flush(FINISH_S):
        log.warning("%d embeddings were not on disk %g s after the end, and are lost", lost, FINISH_S)
