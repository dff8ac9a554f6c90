"""Logprobs as JSON can have them, and those of a prompt in vLLM's form."""

from __future__ import annotations

from typing import Any

from vlmserve.ipc.messages import PromptLogprobs
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer

# JSON has no infinity; a token that sampling made impossible has this instead, as in other servers.
_LEAST_LOGPROB = -9999.0


def finite(logprob: float) -> float:
    """Return a logprob that JSON can have."""
    return max(logprob, _LEAST_LOGPROB)


def prompt_json(found: PromptLogprobs, tokenizer: TextTokenizer) -> dict[str, Any]:
    """Return the fields of an answer about its prompt.

    prompt_logprobs has {token id: {logprob, rank, decoded_token}} for each position: the prompt's token and the
    likeliest. prompt_token_ids_logprobs comes if the request asks for it. The first token has null.
    """

    def entry(token: int, logprob: float, rank: int) -> dict[str, Any]:
        text = tokenizer.token_bytes(token).decode("utf-8", "replace")
        return {"logprob": finite(logprob), "rank": rank, "decoded_token": text}

    after_none = int(found.start == 0)
    rows: list[dict[str, Any] | None] = [None] * after_none
    columns = (found.token_ids, found.logprobs, found.ranks, found.top_ids, found.top_logprobs)
    for own, logprob, rank, ids, logprobs in zip(*(column[after_none:].tolist() for column in columns), strict=True):
        likeliest = enumerate(zip(ids, logprobs, strict=True), start=1)
        rows.append(
            {str(own): entry(own, logprob, rank)}
            | {str(token): entry(token, value, n) for n, (token, value) in likeliest}
        )
    fields: dict[str, Any] = {"prompt_logprobs": rows}
    if found.token_ids_logprobs.shape[1]:
        asked = [[finite(logprob) for logprob in row] for row in found.token_ids_logprobs[after_none:].tolist()]
        fields["prompt_token_ids_logprobs"] = [None] * after_none + asked
    return fields
