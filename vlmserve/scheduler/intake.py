"""From messages to requests, and the work that begins at once: encoding, reading prefixes from disk, grammars."""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vision.encoder_pool import EncoderPool
from vlmserve.config.engine_args import EngineArgs
from vlmserve.ipc.messages import FinishReason, TokenizedGenerateReqInput
from vlmserve.memory.media_keys import MediaKeyTable, embeds_key, radix_key
from vlmserve.scheduler.grammar.grammar_queue import GrammarQueue
from vlmserve.scheduler.grammar.matcher import CompiledGrammar, Patience
from vlmserve.scheduler.handover import RemotePrompts
from vlmserve.scheduler.kv_cache_manager import KVCacheManager, Sessions
from vlmserve.scheduler.outputs import error
from vlmserve.scheduler.policy import SchedulePolicy
from vlmserve.scheduler.req import Req
from vlmserve.scheduler.req_life import ReqTimes
from vlmserve.scheduler.req_media import FairOrder, ReqMedia, num_patches
from vlmserve_common.errors import BadRequestError
from vlmserve_common.process.wake_up import WakeUp

log = logging.getLogger(__name__)

_MOST_CLIENTS = 1024  # with grammars, before those that did no harm are forgotten


@dataclass(eq=False, kw_only=True)
class Intake:
    """Makes `Req`s of messages and follows the work that goes on for them beside the scheduler.

    max_req_len: most tokens of prompt and answer of one request together. encoder_order: turns of clients at the
    encoder. remote: see `PromptAdmission`. sessions: whose KV goes on in other prompts. epoch: of the weights, a part
    of what names cached KV.
    """

    args: EngineArgs
    max_req_len: int
    eos_token_ids: frozenset[int]
    kv: KVCacheManager
    encoder: EncoderPool
    policy: SchedulePolicy
    media_keys: MediaKeyTable
    grammars: GrammarQueue | None
    encoder_order: FairOrder
    clock: Callable[[], float]
    sessions: Sessions
    remote: RemotePrompts | None = None
    epoch: bytes = field(default=b"", init=False)
    _fetches: list[Future[Any]] = field(default_factory=list, init=False)
    _compiling: list[tuple[Req, Future[CompiledGrammar]]] = field(default_factory=list, init=False)
    _patience: dict[str, Patience] = field(default_factory=dict, init=False)  # with clients that have had grammars
    _wake_up: WakeUp = field(default_factory=WakeUp, init=False)  # called when a future is done

    def refusal(self, message: TokenizedGenerateReqInput, known: Container[str]) -> FinishReason | None:
        """Return why a request can never run, or None if it may. known: the rids that are here."""
        if message.rid in known:
            return error(400, f"a request with the id {message.rid!r} is under way")
        if message.priority and not self.policy.preempts:
            return error(
                400,
                f"priority is {message.priority}, and priorities are for servers with --schedule-policy priority; this "
                f"one has {self.args.schedule_policy}",
            )
        if message.sampling_params.grammar is not None and self.grammars is None:
            return error(400, "this engine has no structured output", param=message.sampling_params.grammar.param)
        return None

    def make(self, message: TokenizedGenerateReqInput, others: Iterable[Req]) -> Req:
        """Make the request of a message and submit its media to the encoder. others: all known requests."""
        wanted, length = message.sampling_params.max_new_tokens, len(message.input_ids)
        room = self.max_req_len - length
        # `RequestBuilder` checks a prompt's length, once
        assert 0 < length <= self.max_req_len - (wanted != 0), (message.rid, length, self.max_req_len)
        order, arrival = 0, self.encoder_order.arrive()
        if message.mm_inputs is not None:
            patches = 0 if message.choice else num_patches(message.mm_inputs)  # the other choices have the same media
            order = self.encoder_order.tag(message.client, patches, arrival)
        req = Req(
            message,
            key_ids=radix_key(message.input_ids, message.mm_inputs, self.media_keys)
            if message.input_embeds is None
            else embeds_key(message.input_embeds.digests, self.media_keys),
            media=ReqMedia(message.mm_inputs, self.encoder, order=order, adapter=message.adapter),
            max_new_tokens=room if wanted is None else min(wanted, room),
            eos_token_ids=self.eos_token_ids,
            arrival=arrival,
            times=ReqTimes(self.clock),
        )
        req.namespace = self.namespace_of(req)
        if message.carried is not None and self.kv.may_carry:
            self.sessions.carry(req.session_id, message.carried, self.epoch, self.kv.key_of(req), req.namespace)
        if self.media_keys.is_large:
            self._trim_media_keys([req, *others])
        self._begin_grammar(req)
        req.prefetch = self._begin_prefetch(req)
        remote = self.remote is not None and self.remote.wants(req)
        if message.mm_inputs is not None and req.prefetch is None and not remote:
            req.media.hold_from(self.kv.matched_len(req))
        return req

    def namespace_of(self, req: Req) -> bytes:
        """Return the namespace of KV that is computed for a request now."""
        return self.epoch + req.salt

    def _begin_prefetch(self, req: Req) -> Future[Any] | None:
        """Read the part of its prefix that is only on disk, while the request waits."""
        future = self.kv.prefix_cache.prefetch(self.kv.key_of(req), req.namespace)
        if future is not None:
            self._fetches.append(future)
            future.add_done_callback(lambda _: self._wake_up.call())
        return future

    def _begin_grammar(self, req: Req) -> None:
        """Compile its grammar while the request waits, unless the grammar is compiled already."""
        spec = req.sampling_params.grammar
        if spec is None:
            return
        assert self.grammars is not None, req.rid
        future = self.grammars.get(spec, req.client)
        req.grammar_compiles = True
        self._compiling.append((req, future))
        future.add_done_callback(lambda _: self._wake_up.call())

    def take_grammars(self) -> list[tuple[Req, FinishReason]]:
        """Give requests the grammars that were compiled since. Returns the requests whose grammar failed, and why."""
        failed = []
        done = [pair for pair in self._compiling if pair[1].done()]
        if done:
            self._compiling = [pair for pair in self._compiling if not pair[1].done()]
        for req, future in done:
            spec = req.sampling_params.grammar
            if req.is_finished or spec is None:
                continue
            try:
                req.grammar = future.result().matcher(self._patience_with(req.client))
                req.grammar_compiles = False
            except BadRequestError as refused:
                param = spec.param
                failed.append((req, error(refused.status, f"{param} {refused.message}", param=param)))
            except Exception as failure:
                log.exception("the grammar of %s could not be compiled", req.rid)
                failed.append((req, error(500, f"its grammar could not be compiled: {type(failure).__name__}")))
        return failed

    def _patience_with(self, client: str) -> Patience:
        if len(self._patience) >= _MOST_CLIENTS:  # matchers keep those that are in use
            self._patience = {name: each for name, each in self._patience.items() if each.share < 1}
        return self._patience.setdefault(client, Patience())

    def release(self, req: Req) -> None:
        """Release the grammar of a request that has ended."""
        if req.grammar is not None:
            req.grammar.end()
        if req.sampling_params.grammar is not None and self.grammars is not None:
            self.grammars.release(req.sampling_params.grammar)

    def take_fetched(self) -> None:
        """Tell the prefix cache which prefixes were read since. Call it before `take_grammars`."""
        if self.is_fetching:
            self._wake_up.take()
        if self._fetches:
            self._fetches = [future for future in self._fetches if not future.done()]
            self.kv.prefix_cache.take_fetched()

    @property
    def is_fetching(self) -> bool:
        """Return True while prefixes are being read or grammars compiled."""
        return bool(self._fetches or self._compiling)

    @property
    def wait_handle(self) -> int:
        """Return a file descriptor that becomes readable when a prefix was read or a grammar compiled."""
        return self._wake_up.fd

    def close(self) -> None:
        """End the compilers and close the file descriptor."""
        if self.grammars is not None:
            self.grammars.close()
        self._wake_up.close()

    def _trim_media_keys(self, reqs: Iterable[Req]) -> None:
        """Forget media that neither a cached prefix nor a request holds."""
        live = self.kv.prefix_cache.live_keys()
        for req in reqs:
            live.update(np.unique(req.key_ids[req.key_ids < 0]).tolist())
        self.media_keys.retain(live)
