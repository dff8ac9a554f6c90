"""OpenAI's text completions: their requests, and their objects, whole and in chunks, made of the engine's outputs."""

from __future__ import annotations

import codecs
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Annotated, Any

from pydantic import Discriminator, Field, Tag

from vlmserve.frontend.openai.answers import (
    AnswerHead,
    Writer,
    finite,
    prompt_ids,
    prompt_json,
    shown_logprobs,
    stop_reason,
)
from vlmserve.frontend.openai.protocol import SampledRequest, TokenIds
from vlmserve.frontend.tokenizer_manager import ChoiceOutput
from vlmserve.ipc.messages import FinishReason, PromptLogprobs, TokenOutput
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer


def _prompt_kind(value: Any) -> str | None:
    if isinstance(value, str):
        return "text"
    if not isinstance(value, list):
        return None
    first = value[0] if value else None
    return "ids" if isinstance(first, int) else "id_lists" if isinstance(first, list) else "texts"


Prompt = Annotated[
    Annotated[str, Tag("text")]
    | Annotated[list[str], Field(min_length=1), Tag("texts")]
    | Annotated[TokenIds, Tag("ids")]
    | Annotated[list[TokenIds], Field(min_length=1), Tag("id_lists")],
    Discriminator(
        _prompt_kind,
        custom_error_type="prompt_type",
        custom_error_message="must be text, a list of texts, token ids or a list of such lists",
    ),
]


class CompletionRequest(SampledRequest):
    """POST /v1/completions: the fields of chats, where they make sense, and OpenAI's own."""

    model: str | None = None
    prompt: Prompt
    best_of: int | None = None
    echo: bool | None = None
    logprobs: int | None = None
    suffix: str | None = None


_COLUMNS = ("tokens", "token_logprobs", "top_logprobs", "text_offset")


class _LogprobColumns:
    """The logprobs of one choice in the old shape: a list for each kind of value. text_offset counts characters of the
    choice's own text, up to the first byte of the token."""

    def __init__(self, tokenizer: TextTokenizer, hidden_ids: frozenset[int]) -> None:
        """hidden_ids: tokens of the answer that do not show in its text."""
        self._tokenizer = tokenizer
        self._hidden = hidden_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def of_prompt(self, found: PromptLogprobs, most: int) -> dict[str, list[Any]]:
        """Return the columns of the prompt's tokens, with so many of the likeliest. The first token has null."""
        columns = (found.token_ids, found.logprobs, found.top_ids, found.top_logprobs)
        rows = zip(*(column.tolist() for column in columns), strict=True)
        return self._columns(
            (
                self._row(token, logprob, zip(ids[:most], logprobs[:most], strict=True), none=place == 0)
                for place, (token, logprob, ids, logprobs) in enumerate(rows)
            )
        )

    def of_answer(self, output: TokenOutput) -> dict[str, list[Any]]:
        """Return the columns of an output's tokens, without the token that ended the answer."""
        return self._columns(
            self._row(
                entry.token_id,
                entry.logprob,
                zip(entry.top_ids, entry.top_logprobs, strict=True),
                hidden=entry.token_id in self._hidden,
            )
            for entry in shown_logprobs(output)
        )

    def _row(
        self, token: int, logprob: float, top: Iterable[tuple[int, float]], *, none: bool = False, hidden: bool = False
    ) -> tuple[Any, ...]:
        offset = self._offset
        if not hidden:
            self._offset += len(self._decoder.decode(self._tokenizer.token_bytes(token)))
        if none:
            return self._text(token), None, None, offset
        # as OpenAI has it, the token itself is always among them
        likeliest = {self._text(one): finite(value) for one, value in top} | {self._text(token): finite(logprob)}
        return self._text(token), finite(logprob), likeliest, offset

    def _columns(self, rows: Iterable[tuple[Any, ...]]) -> dict[str, list[Any]]:
        listed = list(rows)
        return {name: [row[place] for row in listed] for place, name in enumerate(_COLUMNS)}

    def _text(self, token: int) -> str:
        """Return a token as OpenAI writes it. Parts of a character are shown by their bytes."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionWriter(Writer):
    """Writes the answers to several prompts, n for each.

    echo: the texts of the prompts, if they are to be repeated. logprobs: how many of the likeliest tokens are named;
    None: no logprobs. prompt_logprobs, include_usage, token_ids, spec_details: the request asks for them. hidden_ids:
    see `_LogprobColumns`.
    """

    chunk_kind = "text_completion"

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: TextTokenizer,
        *,
        prompts: int,
        n: int,
        echo: Sequence[str] | None,
        logprobs: int | None,
        prompt_logprobs: bool,
        include_usage: bool,
        token_ids: bool = False,
        spec_details: bool = False,
        hidden_ids: frozenset[int],
    ) -> None:
        asked = {"include_usage": include_usage, "token_ids": token_ids, "spec_details": spec_details}
        super().__init__(head, tokenizer, prompts=prompts, n=n, **asked)
        self._echo = echo
        self._logprobs = logprobs
        self._prompt_logprobs = prompt_logprobs
        self._columns = [_LogprobColumns(tokenizer, hidden_ids) for _ in range(prompts * n)]
        self._began = [False] * (prompts * n)

    async def whole(self, batches: AsyncIterator[Sequence[ChoiceOutput]]) -> dict[str, Any]:
        """Return the text_completion of all outputs."""
        collected: list[list[TokenOutput]] = [[] for _ in self._columns]
        last: dict[int, ChoiceOutput] = {}
        async for items in batches:
            for item in items:
                self._count(item)
                collected[item.index].append(item.output)
                last[item.index] = item
        choices = [self._choice(index, collected) | prompt_ids(last[index]) for index in range(len(collected))]
        return self._head.object("text_completion", choices=choices, usage=self._usage(), **self._about())

    def events(self, items: Sequence[ChoiceOutput]) -> bytes:
        """Return the next chunks as events. They are empty while the text of the outputs is held back."""
        return b"".join(map(self._event, items))

    def _choice(self, index: int, collected: Sequence[Sequence[TokenOutput]]) -> dict[str, Any]:
        outputs = collected[index]
        of_prompt = collected[index - index % self._n][0].prompt_logprobs  # the prompt's come once
        pieces = [self._piece(index, output, of_prompt) for output in outputs]
        choice = self._as_choice(
            index,
            "".join(text for text, _ in pieces),
            _joined([found for _, found in pieces if found is not None]) if self._logprobs is not None else None,
            outputs[-1].finish_reason,
        )
        if self._prompt_logprobs and of_prompt is not None:
            choice["prompt_logprobs"] = prompt_json(of_prompt, self._tokenizer)["prompt_logprobs"]
        if self._token_ids:
            choice["token_ids"] = [token for output in outputs for token in output.token_ids]
        return choice

    def _event(self, item: ChoiceOutput) -> bytes:
        self._count(item)
        output = item.output
        about = {} if self._began[item.index] else prompt_ids(item)
        if self._token_ids:
            about["token_ids"] = output.token_ids
        text, logprobs = self._piece(item.index, output, output.prompt_logprobs)
        if (
            not text
            and output.finish_reason is None
            and not (logprobs and logprobs["tokens"])
            and not any(about.values())
        ):
            return b""
        choice = self._as_choice(item.index, text, logprobs, output.finish_reason) | about
        return self._chunk_of(choice, **({} if output.finish_reason is None else self._about_at_end()))

    def _piece(
        self, index: int, output: TokenOutput, of_prompt: PromptLogprobs | None
    ) -> tuple[str, dict[str, list[Any]] | None]:
        """Return the text and logprobs of a choice's next output. The first one begins with the repeated prompt."""
        columns, text, found = self._columns[index], output.text, list[dict[str, list[Any]]]()
        if self._echo is not None and not self._began[index]:
            text = self._echo[index // self._n] + text
            if self._logprobs is not None and of_prompt is not None:
                found.append(columns.of_prompt(of_prompt, self._logprobs))
        self._began[index] = True
        if self._logprobs is None:
            return text, None
        return text, _joined([*found, columns.of_answer(output)])

    def _as_choice(self, index: int, text: str, logprobs: Any, finish: FinishReason | None) -> dict[str, Any]:
        choice = {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish and finish.type}
        if finish is not None:
            choice["stop_reason"] = stop_reason(finish)
        return choice


def _joined(found: Sequence[dict[str, list[Any]]]) -> dict[str, list[Any]]:
    return {name: [value for columns in found for value in columns[name]] for name in _COLUMNS}
