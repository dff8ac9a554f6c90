"""LoRA adapters of an engine: where they go in this process's part of the model, and in the other ranks'."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from vlmserve.config.engine_args import EngineArgs
from vlmserve.engine.loop import EventLoop
from vlmserve.executor.adapter_order import AdapterOrder, LoadAdapterOrder, UnloadAdapterOrder
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.ipc.control_messages import AdapterLoaded
from vlmserve.ipc.messages import FinishReason, TokenizedGenerateReqInput
from vlmserve.models.registry import adapter_layouts
from vlmserve.models.vlm import VisionLanguageModel
from vlmserve.scheduler.outputs import error
from vlmserve_common.checkpoint.adapter_ref import AdapterRef, check_place
from vlmserve_common.compute.adapter_store import AdapterStore
from vlmserve_common.errors import CheckpointError

if TYPE_CHECKING:
    from vlmserve_common.parallel.ranks import Ranks


def make_store(args: EngineArgs, model: VisionLanguageModel) -> AdapterStore:
    """Make the store of adapters of a model whose weights may be packed by now."""
    layout, whole = adapter_layouts(Path(args.model), model, without_weights=args.load_format == "dummy")
    store = AdapterStore(
        model,
        layout,
        dtype=model.dtype,
        max_rank=args.max_lora_rank,
        whole=whole,
        partly=args.lora_partial,
    )
    model.language_model.attach_adapters(store.active)
    model.visual.adapters = store.active
    return store


def engine_adapters(
    args: EngineArgs, runner: ModelRunner, loop: EventLoop, worker: object, ranks: Ranks | None
) -> EngineAdapters | None:
    """Return the adapters of an engine; None if it takes none. worker: of the first rank, if there are several."""
    if runner.adapters is None:
        return None
    return EngineAdapters(
        runner.adapters,
        loop,
        ranks=ranks,
        tell=getattr(worker, "tell", None),
        most=args.max_loaded_loras,
        folder=args.allowed_lora_path,
    )


def obey_adapter_order(store: AdapterStore | None, order: AdapterOrder, ranks: Ranks) -> None:
    """Load or forget an adapter, as the first rank says."""
    assert store is not None, "an adapter, and no store of adapters"
    if isinstance(order, UnloadAdapterOrder):
        store.unload(order.digest)
        return
    try:
        store.get(order.adapter)
    except Exception as error:  # whatever it is, the other ranks wait for an answer
        ranks.failure(f"rank {ranks.shard.rank}: {str(error) or type(error).__name__}")
    else:
        ranks.failure("")


class EngineAdapters:
    """The adapters of all ranks, for the engine's thread. All ranks have an adapter, or none.

    ranks, tell: those that share the model, and what has them follow an order; None for a process that is alone. most,
    folder: how many adapters there may be that other servers have named, and where they must lie; None: anywhere.
    """

    def __init__(
        self,
        store: AdapterStore,
        loop: EventLoop,
        *,
        ranks: Ranks | None = None,
        tell: Callable[[AdapterOrder], object] | None = None,
        most: int = 1,
        folder: str | None = None,
    ) -> None:
        self._store, self._loop, self._ranks, self._tell = store, loop, ranks, tell
        self._most, self._folder = most, folder
        self._leaving, self._named = set[str](), set[str]()
        self._brought = OrderedDict[str, None]()  # that other servers named, the one used last at the end

    def load(self, path: str) -> AdapterLoaded:
        """Load an adapter, between two steps. Raises CheckpointError, and nothing has changed."""
        loaded = self._loop.device.submit(self._load, path).result()
        self._named.add(loaded.adapter.digest)
        self._leaving.discard(loaded.adapter.digest)
        self._drop_unused()
        return loaded

    def unload(self, digest: str) -> None:
        """Forget an adapter. If a request that was given up still has it, it goes with the next change."""
        self._named.discard(digest)
        if digest not in self._brought:
            self._leaving.add(digest)
        self._drop_unused()

    def bring(self, ref: AdapterRef) -> None:
        """Have an adapter here for a request that comes from another server. Raises CheckpointError."""
        if ref.digest in self._named:
            return
        if ref.digest not in self._brought:
            check_place(ref.path, self._folder)
            self._loop.device.submit(self._load, ref.path, ref.digest).result()
            self._leaving.discard(ref.digest)
        self._brought[ref.digest] = None
        self._brought.move_to_end(ref.digest)
        while len(self._brought) > self._most:
            oldest, _ = self._brought.popitem(last=False)
            if oldest not in self._named:
                self._leaving.add(oldest)
        self._drop_unused()

    def _drop_unused(self) -> None:
        for digest in self._leaving - self._loop.adapters_in_use():
            self._leaving.remove(digest)
            self._loop.device.submit(self._unload, digest).result()

    def _load(self, path: str, digest: str | None = None) -> AdapterLoaded:
        """Load an adapter on all ranks, in the device's thread. digest: what it must have; None: any."""
        here = {*self._named, *self._brought, *self._leaving}
        ref, left_out = self._store.load(Path(path))
        is_new, failure = ref.digest not in here, ""
        if digest not in (None, ref.digest):
            failure = f"{path} has other files here than the adapter {digest}"
        elif is_new and self._ranks is not None and self._tell is not None:
            self._tell(LoadAdapterOrder(adapter=ref))
            failure = self._ranks.failure("")
        if failure:
            if is_new:
                self._unload(ref.digest)
            raise CheckpointError(failure)
        return AdapterLoaded(adapter=ref, left_out=left_out, is_new=is_new)

    def _unload(self, digest: str) -> None:
        self._store.unload(digest)
        if self._tell is not None:
            self._tell(UnloadAdapterOrder(digest=digest))


def admission(adapters: EngineAdapters | None) -> Callable[[TokenizedGenerateReqInput], FinishReason | None]:
    """Return a function that brings the adapter of another server's prompt, and returns why it cannot be here."""

    def admit(message: TokenizedGenerateReqInput) -> FinishReason | None:
        if message.adapter is None:
            return None
        if adapters is None:
            return error(503, "this server takes no LoRA adapters (setting --enable-lora)")
        try:
            adapters.bring(message.adapter)
        except CheckpointError as failure:
            return error(503, str(failure))
        return None

    return admit
