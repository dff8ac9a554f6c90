"""Connects an engine to other servers: a prefill server to those that take its KV over, and a decode server to those
that compute its prompts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import blake3

from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.model_path import resolve_model
from vlmserve.disaggregation.agent import KVAgent
from vlmserve.disaggregation.decode import KVReceivers
from vlmserve.disaggregation.messages import AgentInfo, LayerPart
from vlmserve.disaggregation.pools import KVPool
from vlmserve.disaggregation.prefill import KVSender
from vlmserve.disaggregation.transport import Transport
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.models.registry import load_config
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve_common.compute.tensors import dtype_name
from vlmserve_common.errors import EngineError
from vlmserve_common.installing import install
from vlmserve_common.transport.addresses import is_loopback, split_tcp_url, tcp_url
from vlmserve_common.transport.wire import WireCodec, join, split
from vlmserve_common.version import __version__

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks

log = logging.getLogger(__name__)

_SAMPLES, _SAMPLE_BYTES = 64, 4096  # of each file of weights: enough to tell fine-tunes from each other


@dataclass(frozen=True, kw_only=True)
class Peers:
    """An engine's links to other servers, of its first rank."""

    agent: KVAgent
    sender: KVSender | None = None
    receivers: KVReceivers | None = None
    url: str = ""

    def close(self) -> None:
        """End all links and their threads."""
        for one in (self.sender, self.receivers, self.agent):
            if one is not None:
                one.close()


def connect_peers(
    args: EngineArgs, runner: ModelRunner, ranks: Ranks | None, *, max_prompt: int = 0, replica: int | None = None
) -> Peers | None:
    """Start this rank's agent; at the first rank, start the links that `args.role` asks for as well. None for a role
    without any, and at other ranks. EngineError if an address cannot be used.

    All ranks call this. max_prompt: tokens of the longest prompt. replica: this engine's number; None for the only one.
    """
    if args.role not in ("prefill", "decode"):
        return None
    listened, port = split_tcp_url(f"tcp://{args.prefill_listen}")
    host = listened if args.role == "prefill" else "127.0.0.1"
    if ranks is not None and args.nnodes > 1:
        host = ranks.host
    pool = KVPool(runner.kv_cache, _parts(args, runner.model), runner.recurrent_cache)
    agent = KVAgent(
        pool,
        host=host,
        peer_key=args.peer_key,
        patience_s=args.prefill_peer_timeout_s,
        transports=_transports(args, pool),
    )
    agent.start()
    shard, codec = runner.model.comm.shard, WireCodec([AgentInfo])
    group = shard.rank // shard.attention.size if shard.groups > 1 else 0
    info = agent.info(host=host if args.nnodes > 1 else "", group=group)
    agents = [info]
    if ranks is not None:
        told = ranks.tell_first("agent", join(codec.encode(info)))
        agents = [codec.decode(split(one)) for one in told]
    if not shard.is_entry:
        return None
    identity = _identity(args, runner)
    if args.role == "prefill":
        sender = KVSender(
            host=host,
            port=port + (replica or 0) if port else 0,
            peer_key=args.peer_key,
            identity=identity,
            agents=agents,
            max_prompt=max_prompt,
        )
        sender.start()
        if args.peer_key is None and not is_loopback(host):
            what = "everyone who reaches this address may read the KV of its prompts"
            log.warning("--prefill-listen is %s, and there is no --peer-key: %s", args.prefill_listen, what)
        return Peers(agent=agent, sender=sender, url=tcp_url(host, sender.port))
    assert args.prefill_urls is not None, "a decode server has prefill servers"
    receivers = KVReceivers(
        args.prefill_urls.split(","),
        host=host,
        peer_key=args.peer_key,
        identity=identity,
        agents=agents,
        patience_s=args.prefill_peer_timeout_s,
    )
    receivers.start()
    return Peers(agent=agent, receivers=receivers)


def _transports(args: EngineArgs, pool: KVPool) -> dict[str, Transport]:
    """Return the transports besides tcp that --kv-transport asks for."""
    asked = args.kv_transport == "nixl"
    if not asked and (args.kv_transport == "tcp" or pool.device.type != "cuda"):
        return {}
    try:
        from vlmserve.disaggregation.nixl import NixlTransport

        return {"nixl": NixlTransport(pool, args.peer_key)}
    except ImportError as error:
        if asked:
            raise EngineError(f"--kv-transport nixl needs: {install('disaggregation')} ({error})") from error
        log.info("KV goes by tcp; for nixl: %s", install("disaggregation"))
    except EngineError as error:
        if asked:
            raise
        log.warning("KV goes by tcp: %s", error)
    return {}


def _parts(args: EngineArgs, model: VisionLanguageModel) -> list[LayerPart]:
    """Say what of the whole model each layer of a rank's cache is."""
    whole = load_config(Path(args.model), model.comm.shard)
    attention, own = model.comm.shard.attention, whole.own_layers
    linear = frozenset() if whole.linear is None else whole.linear.layers
    numbers = [layer for layer in range(whole.num_layers) if layer not in linear and layer in own]
    heads = attention.kv_heads(whole.num_kv_heads)
    first = attention.rank * whole.num_kv_heads // attention.size
    numbers += [whole.num_layers + at for at in range(model.config.num_kv_layers - len(numbers))]  # of an MTP head
    parts = [LayerPart(layer=layer, first=first, heads=heads) for layer in numbers]
    # negative numbers: keys of the index of a layer, all of which every rank has
    parts += [LayerPart(layer=-1 - layer, first=0, heads=1) for layer in numbers[: model.config.num_index_layers]]
    for at, shape in enumerate(model.guessing_kv):  # each rank has its own part, or all have the same
        first = attention.rank * shape.num_kv_heads
        parts.append(LayerPart(layer=whole.num_layers + at, first=first, heads=shape.num_kv_heads))
    return parts


def _identity(args: EngineArgs, runner: ModelRunner) -> dict[str, str]:
    """Return what KV depends on, by names for people."""
    guesses = "none" if args.speculative_algorithm == "ngram" else args.speculative_algorithm
    draft = args.speculative_draft_model_path
    return {
        "vlmserve's version": __version__.partition(".dev")[0],
        "the model": weights_digest(Path(args.model)),
        "--dtype": dtype_name(runner.model.dtype),
        "--kv-cache-dtype": dtype_name(runner.kv_cache.dtype),
        "--quantization": args.quantization,
        "--speculative-algorithm (but for ngram)": guesses,
        "--speculative-draft-model-path": "none" if draft is None else weights_digest(resolve_model(draft)),
    }


def weights_digest(folder: Path) -> str:
    """Digest a checkpoint's configuration, and of its weights names, sizes, headers, and samples from all over them."""
    digest = blake3.blake3()
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            digest.update(file.read(8 + int.from_bytes(file.read(8), "little")))
            for at in range(_SAMPLES):
                file.seek(max(0, size - _SAMPLE_BYTES) * at // (_SAMPLES - 1))
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest(length=8)
