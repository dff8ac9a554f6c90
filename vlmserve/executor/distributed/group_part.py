"""One rank's part of the steps of several attention groups: its own group's step, and its part of the layers that all
groups share."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from vlmserve.executor.distributed.orders import SampleOrder
from vlmserve.executor.logprobs import DeviceLogprobs, prompt_logprobs, sent_tiles
from vlmserve.executor.model_runner import ModelRunner
from vlmserve.executor.model_worker_batch import ModelWorkerBatch, PromptLogprobRows, without_returns
from vlmserve.executor.step_inputs import guess_rounds, returned_states
from vlmserve_common.compute.communicator import Communicator
from vlmserve_common.compute.transfers import transfers_for


@dataclass(frozen=True, kw_only=True, slots=True)
class Returned:
    """What a step gives besides tokens. hidden_states: float32 [H, hidden]. drafts: see `Forwarded`."""

    hidden_states: torch.Tensor | None = None
    prompt_logprobs: DeviceLogprobs | None = None
    drafts: torch.Tensor | None = None


class GroupPart:
    """One rank's part. All ranks call the same methods at the same time.

    runner: of this rank. comm: its connections. samples: whether logits are brought together here. group: the number of
    this rank's group.
    """

    def __init__(self, runner: ModelRunner, comm: Communicator, *, samples: bool) -> None:
        assert comm.tokens is not None, "there are several groups"
        self._runner, self._tokens, self._samples = runner, comm.tokens, samples
        self.group = comm.tokens.group
        self._transfers = transfers_for(runner.device)
        self._no_ids = torch.empty(0, dtype=torch.int64, device=runner.device)
        self._hidden: dict[int, torch.Tensor] = {}  # of steps of this group that are not sampled yet

    @torch.inference_mode()
    def forward(self, steps: Sequence[ModelWorkerBatch | None]) -> list[Returned]:
        """Compute a step of each group; only this rank's own needs its embeddings. Return what each step gives besides
        tokens, if this rank samples."""
        own, drafts = steps[self.group], None
        with self._tokens.among([0 if step is None else len(step.input_ids) for step in steps]):
            if own is None:
                self._runner.join(steps)
            else:
                forwarded = self._runner.forward(without_returns(own), steps)
                self._hidden[own.step], drafts = forwarded.hidden, forwarded.drafts
        return [
            Returned() if step is None else replace(self._returned(group, step), drafts=guesses)
            for group, (step, guesses) in enumerate(zip(steps, self._drafts(steps, drafts), strict=True))
        ]

    @torch.inference_mode()
    def logits(self, steps: Sequence[SampleOrder | None]) -> Iterator[torch.Tensor]:
        """Return the logits float32 [S, vocab] of each group's step; where this rank does not sample, only its part."""
        own, rows = steps[self.group], self.no_rows()
        if own is not None:
            [wanted] = self._transfers.upload([own.token_indices])
            rows = self._hidden.pop(own.step).index_select(0, wanted)
        sizes = [0 if step is None else len(step.token_indices) for step in steps]
        if not any(sizes):
            return iter([rows] * len(steps))
        with self._tokens.among(sizes) as layout:
            found = self._runner.model.compute_logits(self._tokens.gather(rows))
        return (found[layout.of_group(group)] for group in range(len(steps)))

    def _drafts(self, steps: Sequence[ModelWorkerBatch | None], own: torch.Tensor | None) -> list[torch.Tensor | None]:
        """Return the guesses that were made for each group's step, given those of this group's."""
        counts = [sum(sizes) for sizes in zip(*guess_rounds(steps), strict=True)]
        if not counts:
            return [None] * len(steps)
        with self._tokens.among(counts) as layout:
            ids = self._tokens.gather(self._no_ids if own is None else own)
        return [ids[layout.of_group(group)] if count else None for group, count in enumerate(counts)]

    def _returned(self, group: int, step: ModelWorkerBatch) -> Returned:
        asked = step.prompt_logprobs
        if asked is None and not len(step.hidden_tokens):
            return Returned()
        # every rank gets the hidden states of the whole step, as with one group
        sizes = [len(step.input_ids) if other == group else 0 for other in range(self._tokens.groups)]
        with self._tokens.among(sizes) as layout:
            own = self._hidden[step.step] if group == self.group else self.no_rows()
            hidden = self._tokens.gather(own)[layout.of_group(group)]
        states = None
        if len(step.hidden_tokens):
            [wanted] = self._transfers.upload([step.hidden_tokens])
            states = returned_states(hidden, wanted, step)
        found = None if asked is None else self._prompt_logprobs(hidden, asked)
        return Returned(hidden_states=states, prompt_logprobs=found)

    def _prompt_logprobs(self, hidden: torch.Tensor, asked: PromptLogprobRows) -> DeviceLogprobs | None:
        model = self._runner.model
        tiles = sent_tiles(asked, model.config.vocab_size, self._runner.device)
        if tiles and self._samples:
            return prompt_logprobs(hidden, tiles, model.compute_logits)
        for tile in tiles:
            model.compute_logits(hidden.index_select(0, tile.tokens.tensor))
        return None

    def no_rows(self) -> torch.Tensor:
        """Return hidden states of no tokens, [0, hidden]."""
        model = self._runner.model
        return torch.empty((0, model.config.hidden_size), dtype=model.dtype, device=self._runner.device)
