"""Logits processors as an operator would write them."""

import time

import torch


class Forbid:
    """Tokens that may not come, and those that may not come again."""

    name = "forbid"

    def check(self, params):
        if not isinstance(params.get("ids"), list):
            raise ValueError(f"forbid needs ids, a list of token ids; it got {params}")

    def apply(self, logits, prompt_ids, output_ids, params):
        logits[torch.tensor(params["ids"], dtype=torch.int64)] = -torch.inf
        if params.get("again"):
            logits[torch.from_numpy(output_ids)] = -torch.inf
        return logits


class Fails:
    """Works for some tokens, and then does not."""

    def check(self, params):
        pass

    def apply(self, logits, prompt_ids, output_ids, params):
        if len(output_ids) == params.get("at", 0):
            raise RuntimeError("broken on purpose")
        return logits


class Slow:
    """Makes a step last as long as one of a large model, so that an answer goes on until its client leaves."""

    name = "slow"

    def check(self, params):
        pass

    def apply(self, logits, prompt_ids, output_ids, params):
        time.sleep(0.02)
        return logits
