"""Train the default model: `python -m assets.recipe.train RUN_FOLDER`. Stop it at any time; the same command goes on.

The network is transformers' own. Beside the answers it learns what every token of a picture shows, with small heads
that are thrown away afterwards. So the vision tower sees long before the answers alone would teach it to.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer

from assets.recipe.batches import batches
from assets.recipe.losses import Hinter, losses
from assets.recipe.network import Network, make_network, prime_patches, write_checkpoint
from assets.recipe.plan import PLAN, Stage, stage_at
from assets.recipe.tokenizer import make_recipe_tokenizer

_LOG_EVERY = 50


class Run:
    """A training run: all that changes while it goes on, kept in RUN_FOLDER/state.pt.

    average: of the weights over the last few hundred steps. RUN_FOLDER/checkpoint publishes it. start: a published
    checkpoint whose weights (and tokenizer) a new run begins with.
    """

    def __init__(
        self, folder: Path, *, seed: int, device: str, plan: tuple[Stage, ...] = PLAN, start: Path | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.seed, self.device, self.plan = folder, seed, device, plan
        path = folder / "tokenizer.json"
        known = next((p for p in (path, start and start / "tokenizer.json") if p and p.is_file()), None)
        self.tokenizer = Tokenizer.from_file(str(known)) if known else make_recipe_tokenizer()
        self.tokenizer.save(str(path))
        self.network = make_network(self.tokenizer, seed)
        self.hinter = Hinter(self.network.model.language_model.config.hidden_size)
        resumes = (folder / "state.pt").is_file()
        if start is not None and not resumes:
            weights = load_file(start / "model.safetensors")
            self.network.load_state_dict({name: value.float() for name, value in weights.items()}, strict=False)
        elif not resumes:
            first = next(batches(self.tokenizer, plan[0], seed=seed, first=0, end=1, workers=0))
            prime_patches(self.network, first.patches)
        torch.nn.Module.to(self.network, device)
        self.hinter.to(device)
        self.optims = optimizers(self.network, self.hinter)
        self.average = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.step, self.hours = 0, 0.0
        if resumes:
            self._load()

    def _load(self) -> None:
        state = torch.load(self.folder / "state.pt", map_location=self.device)
        self.network.load_state_dict(state["network"])
        self.hinter.load_state_dict(state["hinter"])
        for optim, saved in zip(self.optims, state["optims"], strict=True):
            optim.load_state_dict(saved)
        self.average, self.step, self.hours = state["average"], state["step"], state["hours"]

    def save(self) -> None:
        """Write the state, at once or not at all, and the checkpoint."""
        unfinished = self.folder / "state.pt.new"
        state: dict[str, Any] = {
            "network": self.network.state_dict(),
            "hinter": self.hinter.state_dict(),
            "optims": [optim.state_dict() for optim in self.optims],
            "average": self.average,
            "step": self.step,
            "hours": self.hours,
        }
        torch.save(state, unfinished)
        os.replace(unfinished, self.folder / "state.pt")
        current = {name: value.clone() for name, value in self.network.state_dict().items()}
        self.network.load_state_dict(self.average)
        write_checkpoint(self.folder / "checkpoint", self.network, self.tokenizer)
        self.network.load_state_dict(current)

    def train_stage(self, *, until: int, save_every: int, workers: int) -> None:
        """The rest of the stage that is under way, or up to step `until`."""
        stage, begun = stage_at(self.step, self.plan)
        end = min(until, begun + stage.steps)
        parameters = [*self.network.parameters(), *self.hinter.parameters()]
        self.network.train()
        answers: list[tuple[torch.Tensor, torch.Tensor]] = []
        hints: list[torch.Tensor] = []
        last = time.monotonic()
        data = batches(self.tokenizer, stage, seed=self.seed, first=self.step, end=end, workers=workers)
        for batch in data:
            started = time.monotonic()
            for optim in self.optims:
                for group in optim.param_groups:
                    group["lr"] = stage.rate_at(self.step - begun)
            with torch.autocast(self.device.split(":")[0], torch.bfloat16):
                answer, hint, right = losses(self.network, self.hinter, batch)
            (answer + stage.hint_weight * hint).backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optim in self.optims:
                optim.step()
                optim.zero_grad(set_to_none=True)
            fresh = max(0.005, 1 / (self.step - begun + 2))
            with torch.no_grad():
                for name, value in self.network.state_dict().items():
                    self.average[name].lerp_(value, fresh)
            self.step += 1
            self.hours += (time.monotonic() - started) / 3600
            hints.append(hint.detach())
            if batch.taught.any():
                answers.append((answer.detach(), right))
            if self.step % _LOG_EVERY == 0:
                now = time.monotonic()
                self._log(stage, answers, hints, (now - last) / _LOG_EVERY)
                answers, hints, last = [], [], now
            if self.step % save_every == 0 or self.step == end:
                self.save()

    def _log(
        self, stage: Stage, answers: list[tuple[torch.Tensor, torch.Tensor]], hints: list[torch.Tensor], seconds: float
    ) -> None:
        """answers: (loss, share right) of each step that had some. hints: the loss of each step. seconds: a step's."""
        loss, right = torch.tensor(answers or [(0.0, 0.0)]).mean(0).tolist()
        hint = torch.tensor(hints).mean().item()
        line = {
            "step": self.step,
            "stage": stage.name,
            "loss": round(loss, 4),
            "hints": round(hint, 4),
            "right": round(right, 4),
            "step_s": round(seconds, 2),
            "hours": round(self.hours, 3),
        }
        with (self.folder / "log.jsonl").open("a", encoding="utf-8") as log:
            log.write(json.dumps(line) + "\n")
        print(json.dumps(line), flush=True)
        if not math.isfinite(loss + hint):
            raise RuntimeError(f"the loss at step {self.step} is {loss}, the hints' {hint}; the last state is kept")


def optimizers(network: Network, hinter: Hinter) -> list[torch.optim.Optimizer]:
    """Muon for the matrices inside the blocks, AdamW for all else. Each step sets their learning rate."""
    matrices: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    for name, weight in network.named_parameters():
        inside = weight.ndim == 2 and not any(part in name for part in ("embed", "lm_head"))
        (matrices if inside else others).append(weight)
    others += list(hinter.parameters())
    return [
        torch.optim.Muon(matrices, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the run's state and the published checkpoint are kept")
    parser.add_argument("--start", type=Path, metavar="CHECKPOINT", help="begin with its weights and tokenizer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--until", type=int, help="stop after this step (default: the plan's end)")
    parser.add_argument("--save-every", type=int, default=100, help="steps between saved states")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    run = Run(args.folder, seed=args.seed, device=args.device, start=args.start)
    print(f"{sum(p.numel() for p in run.network.parameters()):,} parameters; from step {run.step}", flush=True)
    until = args.until or sum(stage.steps for stage in run.plan)
    while run.step < until:
        run.train_stage(until=until, save_every=args.save_every, workers=args.workers)


if __name__ == "__main__":
    main()
