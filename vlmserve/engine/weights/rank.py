"""What one process of a model does when its weights change."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import assert_never

from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve.engine.weights.group import TrainerGroups
from vlmserve.engine.weights.memory import ReleasedMemory
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.ipc.weight_messages import (
    ChangeWeightsReq,
    CheckWeightsReq,
    JoinGroupReq,
    LeaveGroupReq,
    ReceiveWeightsReq,
    ReleaseMemoryReq,
    ResumeMemoryReq,
    WeightsOrder,
)
from vlmserve.models.registry import WeightUpdates
from vlmserve_common.checkpoint.given import reader_of
from vlmserve_common.checkpoint.rewrite import Rewriter
from vlmserve_common.checkpoint.weight_source import WeightSource
from vlmserve_common.errors import CheckpointError, VlmserveError

log = logging.getLogger(__name__)


class RankWeights:
    """The weights of one process. number: of this process among all that join a trainer's group. write_tower: writes
    into the towers of encoder processes. alive: called now and then during long work. missing: tensors, by our names,
    that were lost and have not come yet."""

    def __init__(
        self,
        args: EngineArgs,
        runner: ModelRunner,
        *,
        number: int = 0,
        write_tower: Callable[[WeightSource], object] = lambda source: None,
        alive: Callable[[], object] = lambda: None,
    ) -> None:
        self._model, self._write_tower, self._alive = runner.model, write_tower, alive
        self._with_tower = not args.num_encoders and runner.model.comm.shard.is_entry
        self._groups = TrainerGroups(runner.device, number, alive)
        self.memory = ReleasedMemory(runner, alive)
        self.missing: frozenset[str] = frozenset()
        self._cannot = _why_fixed(args)
        self._updates: WeightUpdates | None = None
        if self._cannot:
            return
        try:  # now: the folder may have other files later
            self._updates = WeightUpdates(Path(args.model), runner.model, without_weights=args.load_format == "dummy")
        except CheckpointError as error:
            self._cannot = str(error)

    def obey(self, order: WeightsOrder) -> tuple[str, int]:
        """Do as an order says. Returns why that is impossible, or "", and the bytes that it was about. Only an order to
        change weights or memory may leave something done when it fails."""
        try:
            return "", self._obey(order)
        except (VlmserveError, OSError) as error:
            return str(error), 0
        except Exception as error:
            log.exception("%s failed", type(order).__name__)
            return f"{type(error).__name__}: {error}", 0

    def _obey(self, order: WeightsOrder) -> int:
        match order:
            case CheckWeightsReq():
                return self._check(order.source)
            case ReceiveWeightsReq():
                return self._groups.receive(order.source)
            case ChangeWeightsReq():
                return self._change(order.source)
            case JoinGroupReq():
                self._groups.join(order)
                return 0
            case LeaveGroupReq():
                self._groups.leave(order.name)
                return 0
            case ReleaseMemoryReq():
                if order.discard and self._updates is None:
                    raise CheckpointError(f"the weights cannot be forgotten, as no others may come: {self._cannot}")
                released = self.memory.release(order.tags, discard=order.discard)
                if order.discard and "weights" in order.tags:
                    self._lose_all()
                return released
            case ResumeMemoryReq():
                return self.memory.resume(order.tags)
        assert_never(order)

    def _check(self, source: WeightSource) -> int:
        if self._updates is None:
            raise CheckpointError(self._cannot)
        if "weights" in self.memory.released:
            raise CheckpointError("the memory of the weights is released: resume it first")
        if source.group is not None:
            self._groups.check(source.group)
        if source.folder is not None:
            self._updates.check_config(Path(source.folder))
        _, matched = self._updates.match(reader_of(source), is_part=source.folder is None)
        return len(matched)

    def _change(self, source: WeightSource) -> int:
        assert self._updates is not None, "the order was not checked"
        if source.group is not None:
            source = replace(source, tensors=self._groups.take())
        reader = reader_of(source)
        outline, matched = self._updates.match(reader, is_part=source.folder is None, with_tower=self._with_tower)
        try:
            Rewriter(self._model, outline).write(matched, self._alive)
            self._model.repack_head()
            self._write_tower(source)
        except BaseException:
            self._lose_all()
            raise
        finally:
            self._groups.forget()
        self.missing -= self._updates.names(reader)
        return sum(view.nbytes for _, view in matched)

    def _lose_all(self) -> None:
        assert self._updates is not None
        self.missing = self._updates.all_names


def _why_fixed(args: EngineArgs) -> str:
    """Return why an engine's weights cannot change; "" if they can."""
    if args.enable_eplb:
        return f"{flag('enable_eplb')} moves experts about, so their weights cannot be replaced"
    if args.merge_lora:
        return f"{flag('merge_lora')} has added an adapter to the weights, and new ones would be without it"
    if args.role != "all" or args.encoder_urls is not None:
        return "other servers work with these weights, too, and would keep the old ones: they cannot be replaced"
    return ""
