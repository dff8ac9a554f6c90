"""OpenAI's chat completion objects, whole and in chunks, made of the engine's outputs."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, ClassVar

import numpy as np

from processors.families.report import MediumReport, report_json
from vlmserve.frontend.chat_template import NO_NOTES
from vlmserve.frontend.openai.json_bodies import json_text, sse_event
from vlmserve.frontend.parsers.answer import CLOSE as THOUGHT
from vlmserve.frontend.parsers.answer import OPEN as THINK
from vlmserve.frontend.parsers.answer import PLAIN_TEXT, AnswerReading
from vlmserve.frontend.parsers.calls import CallArguments, CallBegin, Piece, Reasoning, Text
from vlmserve.frontend.request_stats import Timings
from vlmserve.frontend.tokenizer_manager import ChoiceOutput
from vlmserve.ipc.messages import FinishReason, Guesses, PromptLogprobs, TokenLogprobs, TokenOutput
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer


@dataclass(frozen=True, kw_only=True)
class AnswerHead:
    """The fields that all objects of an answer repeat. created: Unix time in seconds."""

    id: str
    created: int
    model: str

    def object(self, kind: str, **rest: Any) -> dict[str, Any]:
        """Return an object of this answer."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, **rest}


class Writer:
    """Writes the answers to one or more prompts, n for each, and counts their tokens. include_usage: the request asks
    for the usage at the end of a stream. token_ids: it asks for the ids of prompts and answers. spec_details: it asks
    for figures of guessed tokens in the usage."""

    chunk_kind: ClassVar[str]

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: TextTokenizer,
        *,
        prompts: int,
        n: int,
        include_usage: bool,
        token_ids: bool = False,
        spec_details: bool = False,
    ) -> None:
        self._head = head
        self._tokenizer = tokenizer
        self._n = n
        self._include_usage = include_usage
        self._token_ids = token_ids
        self._spec_details = spec_details
        self._completions, self._guesses = [0] * (prompts * n), [Guesses()] * (prompts * n)
        self._prompts, self._cached = [0] * prompts, [0] * prompts
        self._left = prompts * n  # choices that have not ended
        self._warnings: dict[str, None] = {}

    @property
    def total_tokens(self) -> int:
        """Return the tokens of prompts and answers so far."""
        return sum(self._prompts) + sum(self._completions)

    def usage_event(self) -> bytes:
        """Return the event with the usage, which follows all choices if the request asks for it."""
        if not self._include_usage:
            return b""
        return sse_event(self._head.object(self.chunk_kind, choices=[], usage=self._usage(), **self._about()))

    def _about(self) -> dict[str, Any]:
        return {"warnings": list(self._warnings)} if self._warnings else {}

    def _about_at_end(self) -> dict[str, Any]:
        """Count a choice as ended. Returns the remarks for its chunk, if it is the last one of the stream."""
        self._left -= 1
        return {} if self._left or self._include_usage else self._about()

    def _count(self, item: ChoiceOutput) -> None:
        self._warnings |= dict.fromkeys(item.notes.warnings)
        prompt, choice = divmod(item.index, self._n)
        self._prompts[prompt] = item.output.prompt_tokens
        self._completions[item.index] = item.output.completion_tokens
        self._guesses[item.index] = item.output.guesses or self._guesses[item.index]
        if choice == 0:  # later choices find the first one's prompt in the cache
            self._cached[prompt] = item.output.cached_tokens

    def _usage(self) -> dict[str, Any]:
        """Return the tokens of all prompts, each once, and of all answers."""
        prompt, completion = sum(self._prompts), sum(self._completions)
        usage: dict[str, Any] = {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": sum(self._cached)},
        }
        guesses = reduce(Guesses.plus, self._guesses)
        if guesses.steps:
            usage["completion_tokens_details"] = {
                "accepted_prediction_tokens": guesses.right,
                "rejected_prediction_tokens": guesses.tokens - guesses.right,
            }
        if self._spec_details:
            usage["spec_tokens_details"] = {
                "spec_verify_ct": guesses.steps,
                "spec_num_proposed_drafts": guesses.tokens,
                "spec_num_correct_drafts": guesses.right,
                "spec_num_correct_drafts_per_pos": guesses.right_at,
                "spec_accept_length": guesses.accept_length,
            }
        return usage

    def _chunk_of(self, choice: dict[str, Any], **about: Any) -> bytes:
        # With include_usage every chunk has the field, which is null except in the last one.
        usage = {"usage": None} if self._include_usage else {}
        return sse_event(self._head.object(self.chunk_kind, choices=[choice], **usage, **about))


class AnswerWriter(Writer):
    """Writes one request's answer of n choices.

    logprobs, mm_report, include_usage, token_ids, spec_details: the request asks for them. The timings of choice 0 come
    with mm_report. usage_details: usage has the kinds of the prompt's tokens, and the timings. reading: how tool calls
    and thoughts are found in the text. An answer has `warnings` if a part of the request had no effect.
    """

    chunk_kind = "chat.completion.chunk"

    def __init__(
        self,
        head: AnswerHead,
        tokenizer: TextTokenizer,
        *,
        n: int,
        logprobs: bool,
        mm_report: bool = False,
        include_usage: bool = False,
        usage_details: bool = False,
        token_ids: bool = False,
        spec_details: bool = False,
        reading: AnswerReading = PLAIN_TEXT,
    ) -> None:
        asked = {"include_usage": include_usage, "token_ids": token_ids, "spec_details": spec_details}
        super().__init__(head, tokenizer, prompts=1, n=n, **asked)
        self._logprobs = logprobs
        self._mm_report = mm_report
        self._usage_details = usage_details
        self._reading = reading
        # what the outputs so far say of the whole request
        self._frames: list[tuple[bytes, bytes] | None] = [None] * n  # of choices that have begun
        self._texts: list[ChoiceText | None] = [None] * n
        self._notes = NO_NOTES
        self._thoughts: list[ThoughtTokens] | None = None
        self._media: tuple[MediumReport, ...] = ()
        self._timings: Timings | None = None

    async def whole(self, outputs: AsyncIterator[ChoiceOutput]) -> dict[str, Any]:
        """Return the chat.completion of all outputs."""
        texts: list[list[str]] = [[] for _ in range(self._n)]
        logprobs: list[list[dict[str, Any]]] = [[] for _ in range(self._n)]
        ids: list[list[int]] = [[] for _ in range(self._n)]
        finishes: list[FinishReason | None] = [None] * self._n
        hidden: list[list[np.ndarray]] = [[] for _ in range(self._n)]
        prompt: PromptLogprobs | None = None
        async for item in outputs:
            self._note(item)
            texts[item.index].append(item.output.text)
            finishes[item.index] = item.output.finish_reason
            prompt = prompt or item.output.prompt_logprobs
            if item.output.hidden_states is not None:
                hidden[item.index].append(item.output.hidden_states)
            if self._logprobs:
                logprobs[item.index] += self._tokens(item.output)
            if self._token_ids:
                ids[item.index] += item.output.token_ids
        choices = [
            {
                "index": index,
                "message": message_of(self._text(index).feed("".join(texts[index]), final=True)),
                "logprobs": {"content": logprobs[index], "refusal": None} if self._logprobs else None,
                "finish_reason": self._finish_type(index, finishes[index]),
                "stop_reason": stop_reason(finishes[index]),
                **({"token_ids": ids[index]} if self._token_ids else {}),
                **({"hidden_states": np.concatenate(hidden[index]).tolist()} if hidden[index] else {}),
            }
            for index in range(self._n)
        ]
        # of a long prompt they are many
        about = await asyncio.to_thread(prompt_json, prompt, self._tokenizer) if prompt is not None else {}
        about |= prompt_ids(item)  # all outputs have the same
        return self._head.object("chat.completion", choices=choices, usage=self._usage(), **self._about(), **about)

    def events(self, items: Sequence[ChoiceOutput]) -> bytes:
        """Return the next chat.completion.chunks as events: the role of each choice first, its finish_reason last.

        The last chunk, or that of `usage_event`, has the remarks on the media. The events are empty while the text of
        the outputs is held back.
        """
        return b"".join([event for item in items for event in self._events_of(item)])

    def _events_of(self, item: ChoiceOutput) -> Iterator[bytes]:
        self._note(item)
        output = item.output
        frame = self._frames[item.index]
        if frame is None:
            frame = self._frames[item.index] = self._text_frame(item.index)
            yield self._chunk(item.index, {"role": "assistant", "content": ""}, **prompt_ids(item))
        tokens = self._tokens(output) if self._logprobs else None
        ids = output.token_ids if self._token_ids else None
        for piece in self._text(item.index).feed(output.text, final=output.finish_reason is not None):
            if tokens is None and ids is None and isinstance(piece, Text):
                yield frame[0] + json_text(piece.text) + frame[1]
            else:
                yield self._chunk(item.index, delta_of(piece), tokens=tokens, ids=ids)
                tokens, ids = tokens and [], ids and ()  # they come once
        if tokens or ids:  # their text is held back
            yield self._chunk(item.index, {"content": ""}, tokens=tokens, ids=ids)
        if output.finish_reason is not None:
            yield self._chunk(item.index, {}, finish=output.finish_reason, **self._about_at_end())

    def _text(self, index: int) -> ChoiceText:
        """Return the reader of a choice's text, made when the choice's first output has come."""
        text = self._texts[index]
        if text is None:
            text = self._texts[index] = ChoiceText(self._reading, thinking=self._notes.thinking)
        return text

    def _text_frame(self, index: int) -> tuple[bytes, bytes]:
        """Return the bytes before and after the text in a choice's chunks, which all of them repeat.

        The frame is the event of an empty text, cut where the text goes. No other empty string follows there.
        """
        before, _, after = self._chunk(index, {"content": ""}).rpartition(b'""')
        return before, after

    def _note(self, item: ChoiceOutput) -> None:
        self._count(item)
        if item.index == 0:
            self._timings = item.timings
        self._media = item.media
        self._notes = item.notes
        if self._reading.reasoning:
            if self._thoughts is None:
                tags = [self._tokenizer.id_of(tag) for tag in (THINK, THOUGHT)]
                self._thoughts = [ThoughtTokens(*tags, thinking=item.notes.thinking) for _ in range(self._n)]
            self._thoughts[item.index].add(item.output.token_ids)

    def _usage(self) -> dict[str, Any]:
        usage = super()._usage()
        if self._usage_details:
            usage["prompt_tokens_details"] |= prompt_details(usage["prompt_tokens"], self._media)
            usage["timings"] = self._timings and asdict(self._timings)
        if self._thoughts is not None:
            thoughts = sum(choice.count for choice in self._thoughts)
            usage.setdefault("completion_tokens_details", {})["reasoning_tokens"] = thoughts
        return usage

    def _about(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self._mm_report:
            fields = {"mm_report": report_json(self._media), "timings": self._timings and asdict(self._timings)}
        warnings = [*self._warnings, *(text.warning for text in self._texts if text and text.warning)]
        warnings += [warning for medium in self._media for warning in medium.warnings()]
        return fields | ({"warnings": warnings} if warnings else {})

    def _chunk(
        self,
        index: int,
        delta: dict[str, Any],
        *,
        tokens: list[dict[str, Any]] | None = None,
        ids: Sequence[int] | None = None,
        finish: FinishReason | None = None,
        **about: Any,
    ) -> bytes:
        choice: dict[str, Any] = {
            "index": index,
            "delta": delta,
            "logprobs": None if tokens is None else {"content": tokens, "refusal": None},
            "finish_reason": self._finish_type(index, finish),
        }
        if ids is not None:
            choice["token_ids"] = ids
        if finish is not None:
            choice["stop_reason"] = stop_reason(finish)
        return self._chunk_of(choice, **about)

    def _finish_type(self, index: int, finish: FinishReason | None) -> str | None:
        if finish is None:
            return None
        return "tool_calls" if finish.type == "stop" and self._text(index).called else finish.type

    def _tokens(self, output: TokenOutput) -> list[dict[str, Any]]:
        return [self._token(entry) for entry in shown_logprobs(output)]

    def _token(self, entry: TokenLogprobs) -> dict[str, Any]:
        top = zip(entry.top_ids, entry.top_logprobs, strict=True)
        token = self._named(entry.token_id, entry.logprob)
        token["top_logprobs"] = [self._named(token_id, logprob) for token_id, logprob in top]
        if entry.token_ids_logprobs:
            token["token_ids_logprobs"] = list(map(finite, entry.token_ids_logprobs))
        return token

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._tokenizer.token_bytes(token_id)
        return {"token": raw.decode("utf-8", "replace"), "logprob": finite(logprob), "bytes": list(raw)}


def shown_logprobs(output: TokenOutput) -> Sequence[TokenLogprobs]:
    """Return the logprobs of an output's tokens, without a token that ended the answer and does not show."""
    listed, finish = output.logprobs or (), output.finish_reason
    if finish is None or finish.type != "stop" or finish.shown or not listed:
        return listed
    return listed[:-1] if listed[-1].token_id == finish.matched else listed


def prompt_ids(item: ChoiceOutput) -> dict[str, Any]:
    """Return the field with the ids of an output's prompt, if the request asks for it."""
    return {} if item.prompt_ids is None else {"prompt_token_ids": item.prompt_ids.tolist()}


def prompt_details(tokens: int, media: Sequence[MediumReport]) -> dict[str, int]:
    """Return how many tokens of a prompt are text, pictures, videos and, if there are any, sounds, and how many left
    media, if that was asked."""
    sounds = sum(medium.audio.tokens for medium in media if medium.audio is not None)
    of = {kind: sum(medium.tokens for medium in media if medium.kind == kind) for kind in ("image", "video")}
    pruned = {"pruned_tokens": sum(medium.pruned_tokens for medium in media)} if any(m.pruning for m in media) else {}
    return {
        "text_tokens": tokens - sum(of.values()) - sounds,
        "image_tokens": of["image"],
        "video_tokens": of["video"],
        **({"audio_tokens": sounds} if sounds else {}),
        **pruned,
    }


def stop_reason(finish: FinishReason | None) -> str | None:
    """Return the stop string that was found, as other servers do."""
    return finish.matched if finish is not None and isinstance(finish.matched, str) else None


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


# ---- the message of an answer, whole and in deltas, made of the pieces that the parsers find


def delta_of(piece: Piece) -> dict[str, Any]:
    """Return the delta that a stream's chunk has for a piece."""
    match piece:
        case Text():
            return {"content": piece.text}
        case Reasoning():
            return {"reasoning_content": piece.text}
        case CallBegin():
            function = {"name": piece.name, "arguments": ""}
            call = {"index": piece.index, "id": f"call_{secrets.token_hex(12)}", "type": "function"}
            return {"tool_calls": [{**call, "function": function}]}
        case CallArguments():
            return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}


def joined_deltas(deltas: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the whole message of a stream's deltas."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    for delta in deltas:
        for name in texts:
            texts[name] += delta.get(name) or ""
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                calls.append({**call, "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    calls = [{name: value for name, value in call.items() if name != "index"} for call in calls]
    return {
        "role": "assistant",
        "content": texts["content"] or (None if calls else ""),
        **({"reasoning_content": texts["reasoning_content"]} if texts["reasoning_content"] else {}),
        **({"tool_calls": calls} if calls else {}),
    }


def message_of(pieces: Iterable[Piece]) -> dict[str, Any]:
    """Return the whole message: the sum of its deltas."""
    content, reasoning = "", ""
    calls: list[dict[str, Any]] = []
    for piece in pieces:
        match piece:
            case Text():
                content += piece.text
            case Reasoning():
                reasoning += piece.text
            case CallBegin():
                [call] = delta_of(piece)["tool_calls"]
                calls.append({key: value for key, value in call.items() if key != "index"})
            case CallArguments():
                calls[piece.index]["function"]["arguments"] += piece.text
    return {
        "role": "assistant",
        "content": content or (None if calls else ""),
        "refusal": None,
        **({"reasoning_content": reasoning} if reasoning else {}),
        **({"tool_calls": calls} if calls else {}),
    }


class ThoughtTokens:
    """Counts the tokens of one choice's thoughts and of their tags. opened, closed: the ids of these tags. thinking:
    the prompt has begun the thoughts."""

    def __init__(self, opened: int | None, closed: int | None, *, thinking: bool) -> None:
        self.count = 0
        self._opened = opened
        self._closed = closed
        self._thinking = thinking

    def add(self, ids: Sequence[int]) -> None:
        """Count the next tokens."""
        for token in ids:
            self._thinking |= token == self._opened
            self.count += self._thinking
            self._thinking &= token != self._closed


class ChoiceText:
    """Reads one choice's text. thinking: the prompt has begun the thoughts. called: the text calls a tool. If the
    request allows one call only, later calls are left out, with a warning."""

    def __init__(self, reading: AnswerReading, *, thinking: bool) -> None:
        self.called = False
        self.warning = ""
        self._parser = reading.parser(thinking=thinking)
        self._only_one = reading.calls is not None and not reading.calls.parallel

    def feed(self, text: str, *, final: bool) -> list[Piece]:
        """Return the pieces that are certain by now. final: this text is the last one."""
        if self._parser is None:
            return [Text(text)] if text else []
        return [piece for piece in self._parser.feed(text, final=final) if self._is_wanted(piece)]

    def _is_wanted(self, piece: Piece) -> bool:
        if not isinstance(piece, CallBegin | CallArguments):
            return True
        self.called = True
        if piece.index == 0 or not self._only_one:
            return True
        self.warning = "the model called more than one tool; with parallel_tool_calls: false the answer has the first"
        return False
