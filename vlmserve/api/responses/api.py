"""OpenAI's Responses API, made of chat completions, and the responses that later requests go on from."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any, ParamSpec, TypeVar

from fastapi import Request
from starlette.responses import JSONResponse, Response

from processors.processed import ProcessedMedium
from vlmserve.api.body import check_items, read_body
from vlmserve.api.callers import caller_of, owner_of
from vlmserve.api.chat import chat_events
from vlmserve.api.errors import not_found
from vlmserve.api.openapi import KEPT_ERRORS, MODEL_ERRORS, operation
from vlmserve.api.pages import page_of, page_query
from vlmserve.api.request_id import name_answer
from vlmserve.api.responses.held import HeldMedia, media_in, num_media, with_last_media
from vlmserve.api.responses.items import Conversation, to_chat_request, to_conversation, with_ids
from vlmserve.api.responses.protocol import DeletedResponse, InputItems, ResponseEvent, ResponseObject, ResponsesRequest
from vlmserve.api.responses.writer import ResponseWriter
from vlmserve.api.served_model import EventStream, ServedModel, parsed_events, while_connected
from vlmserve.api.stores.opening import Stores
from vlmserve.frontend.openai.json_bodies import json_text
from vlmserve.frontend.requests import Caller, WarmupInput
from vlmserve_common.errors import BadRequestError

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    seq {key}, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, previous TEXT, size BIGINT NOT NULL,
    input TEXT NOT NULL, response TEXT NOT NULL
)
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredResponse:
    """A stored response. input: its own items, without those of earlier responses. response: the object. previous: the
    id of the response before it."""

    input: list[dict[str, Any]]
    response: dict[str, Any]
    previous: str | None

    @property
    def items(self) -> list[dict[str, Any]]:
        """Return its input and its output."""
        return [*self.input, *self.response["output"]]


class ResponseStore:
    """The responses in stores. most: responses that it keeps; 0 keeps none. most_bytes: the limit of their JSON. Its
    methods raise StoreUnavailableError."""

    def __init__(self, stores: Stores, *, most: int, most_bytes: int) -> None:
        self._database = stores.database("responses", _SCHEMA)
        self.threads = self._database.threads
        self.close = self._database.close
        self._most = most
        self._most_bytes = most_bytes

    def add(self, owner: str, response: dict[str, Any], given: Sequence[dict[str, Any]]) -> None:
        """Keep a response. Beyond the limits, forget the oldest of the owner who has the most. A response larger than
        the store is not kept."""
        told, items = json_text(response).decode(), json_text(given).decode()
        row = (response["id"], owner, response["previous_response_id"], len(told) + len(items), items, told)
        with self._database.transaction(alone=True) as rows:
            rows.run(
                "INSERT INTO responses (id, owner, previous, size, input, response) VALUES (?, ?, ?, ?, ?, ?)", *row
            )
            totals = rows.find("SELECT owner, count(*), CAST(sum(size) AS BIGINT) FROM responses GROUP BY owner")
            counts, sizes = ({each[0]: each[place] for each in totals} for place in (1, 2))
            while (many := sum(counts.values()) > self._most) or sum(sizes.values()) > self._most_bytes:
                held = counts if many else sizes
                most = max(held, key=lambda name: held[name])
                oldest = "SELECT seq, size FROM responses WHERE owner = ? ORDER BY seq LIMIT 1"
                [(seq, freed)] = rows.find(oldest, most)
                rows.run("DELETE FROM responses WHERE seq = ?", seq)
                counts[most], sizes[most] = counts[most] - 1, sizes[most] - freed

    def find(self, owner: str, response_id: str) -> StoredResponse:
        """Return a response. Raises BadRequestError (404) for an unknown response and another owner's alike."""
        query = "SELECT input, response, previous FROM responses WHERE id = ? AND owner = ?"
        found = self._database.find(query, response_id, owner)
        if not found:
            raise not_found("response", response_id)
        given, response, previous = found[0]
        return StoredResponse(input=json.loads(given), response=json.loads(response), previous=previous)

    def chain(self, owner: str, response_id: str) -> list[StoredResponse]:
        """Return a response and those that it goes back to, the newest first. Raises BadRequestError (404)."""
        return list(self._chain(owner, response_id))

    def delete(self, owner: str, response_id: str) -> None:
        """Delete a response, so that no request can go on from it any more. Raises BadRequestError (404)."""
        self.find(owner, response_id)
        with self._database.transaction() as rows:
            rows.run("DELETE FROM responses WHERE id = ?", response_id)

    def _chain(self, owner: str, response_id: str) -> Iterator[StoredResponse]:
        at: str | None = response_id
        while at is not None:
            try:
                found = self.find(owner, at)
            except BadRequestError as error:
                message = str(error) if at == response_id else f"{error}, which {response_id!r} goes back to"
                raise BadRequestError(
                    f"{message}: it was not stored, or has been deleted (setting --max-stored-responses)",
                    param="previous_response_id",
                    code="previous_response_not_found",
                    status=404,
                ) from None
            yield found
            at = found.previous


_LIST_LIMIT = 100
# what a response repeats of its request as it is
_REPEATED = (
    *("instructions", "max_output_tokens", "max_tool_calls", "previous_response_id"),
    *("temperature", "top_p", "user"),
)
_P = ParamSpec("_P")
_T = TypeVar("_T")


class ResponsesApi:
    """The endpoints under /v1/responses. A response belongs to the API key that made it."""

    def __init__(self, served: ServedModel, store: ResponseStore, held: HeldMedia) -> None:
        self._served = served
        self._store = store
        self._held = held
        # Writing JSON keeps the interpreter to itself: several threads at it would stop the event loop for long.
        self._writing = asyncio.Lock()

    @operation(
        *("POST", "/v1/responses", "createResponse", "Responses"),
        request=ResponsesRequest,
        example={"input": "Hello", "max_output_tokens": 64},
        answer=ResponseObject,
        events=ResponseEvent,
        errors=(*MODEL_ERRORS, 507),
    )
    async def create(self, request: Request) -> Response:
        """Answer a conversation, whole or as a stream, and keep it. Raises the errors of `errors` before anything has
        been sent."""
        body = await read_body(request, ResponsesRequest, self._served.settings)
        self._served.check_name(body.model)
        own_id = name_answer(request, "resp", body.rid)
        if body.stream:
            return await EventStream.begin(request.receive, self._events(body, own_id, caller_of(request)))
        answer = await while_connected(request.receive, self.whole(body, own_id, caller_of(request)))
        return await self._written(JSONResponse, answer)

    async def whole(self, body: ResponsesRequest, own_id: str, caller: Caller) -> dict[str, Any]:
        """Return the response object. own_id: an id that no other request has. Raises the errors of `errors`."""
        async with aclosing(self._made(body, own_id, caller)) as made:
            events = [event async for some in made for event in some]
        return events[-1]["response"]

    @operation(
        *("GET", "/v1/responses/{response_id}", "getResponse", "Responses"), answer=ResponseObject, errors=KEPT_ERRORS
    )
    async def retrieve(self, request: Request, response_id: str) -> Response:
        """Return a response that was kept."""
        found = await self._store.threads.run(self._store.find, owner_of(request), response_id)
        return JSONResponse(found.response)

    @operation(
        *("DELETE", "/v1/responses/{response_id}", "deleteResponse", "Responses"),
        answer=DeletedResponse,
        errors=KEPT_ERRORS,
    )
    async def delete(self, request: Request, response_id: str) -> Response:
        """Forget a response."""
        await self._store.threads.run(self._store.delete, owner_of(request), response_id)
        self._held.forget(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    @operation(
        *("GET", "/v1/responses/{response_id}/input_items", "listInputItems", "Responses"),
        query=page_query(_LIST_LIMIT, 20),
        answer=InputItems,
        errors=(400, *KEPT_ERRORS),
    )
    async def input_items(self, request: Request, response_id: str) -> Response:
        """List the items that a response was asked with."""
        items = (await self._store.threads.run(self._store.find, owner_of(request), response_id)).input
        items, page = page_of(request.query_params, items, lambda item: item["id"], most=_LIST_LIMIT, usual=20)
        return JSONResponse(page | {"data": items})

    async def _written(self, write: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
        """Write JSON in a thread, one at a time: with logprobs it is large."""
        async with self._writing:
            return await self._served.threads.run(write, *args, **kwargs)

    async def _events(self, body: ResponsesRequest, own_id: str, caller: Caller) -> AsyncGenerator[bytes, None]:
        async with aclosing(self._made(body, own_id, caller)) as made:
            async for events in made:
                whole = "response" in events[-1]  # then all of it comes several times
                yield await self._written(_encoded, events) if whole else _encoded(events)

    async def _made(
        self, body: ResponsesRequest, own_id: str, caller: Caller
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield events as they are made; the last one has the whole response. Errors before the first are raised."""
        given = with_ids(body.input)
        chain: list[StoredResponse] = []
        if body.previous_response_id is not None:
            chain = await self._store.threads.run(self._store.chain, caller.owner, body.previous_response_id)
        before = [item for found in reversed(chain) for item in found.items]
        conversation = await self._served.threads.run(to_conversation, before, given, body.instructions)
        try:
            check_items({"messages": conversation.messages}, self._served.settings)  # earlier ones are among them
        except BadRequestError as error:
            raise conversation.named(error) from None
        writer = ResponseWriter(_base(body, own_id, self._served.name_for(body)))
        media = _Media(wanted=self._held.holds and body.store is not False and not caller.unattended)
        if chain:
            media.known = self._held.find([found.response["id"] for found in chain])
            media.session = f"responses from {chain[-1].response['id']}"
        async with aclosing(self._chunks(body, conversation, media, own_id, caller)) as chunks:
            first = await anext(chunks)
            yield [*writer.begin(), *_events_of(writer, first)]
            async for some in chunks:
                if events := _events_of(writer, some):
                    yield events
        end, response = list(writer.end()), writer.response()
        if body.store is not False:
            await self._store.threads.run(self._store.add, caller.owner, response, given)
            if media.wanted:
                self._held.keep(own_id, media.new, whole=media.whole)
        yield [*end, writer.last(response)]

    async def _chunks(
        self, body: ResponsesRequest, conversation: Conversation, media: _Media, own_id: str, caller: Caller
    ) -> AsyncGenerator[list[dict[str, Any]], None]:
        """Yield the chunks of the chat. `truncation: auto` leaves out the oldest turns until the rest fits."""
        whole, dropped = conversation, 0
        while True:
            chat = await self._served.threads.run(to_chat_request, body, conversation)
            if not dropped:
                whole = conversation = await self._loaded(body, conversation, media, own_id, caller)
            changes = {"messages": conversation.shown or conversation.messages}
            chat = chat.model_copy(update=changes | {"session_id": chat.session_id or media.session})
            async with aclosing(chat_events(self._served, chat, own_id, caller)) as events:
                try:
                    first = await anext(events)
                except BadRequestError as error:
                    dropped = 2 * dropped or 1
                    shorter = whole.without_turns(dropped) if body.truncation == "auto" else None
                    if error.code != "context_length_exceeded" or shorter is None:
                        raise conversation.named(error) from None
                    conversation = shorter
                    continue
                yield parsed_events(first)
                async for some in events:
                    yield parsed_events(some)
                return

    async def _loaded(
        self, body: ResponsesRequest, conversation: Conversation, media: _Media, own_id: str, caller: Caller
    ) -> Conversation:
        """Return a conversation with processed media: those that are held, and others, which are loaded now if they
        are to be held. Raises BadRequestError."""
        if not num_media(conversation.messages) or not (media.wanted or media.known):
            return conversation
        places = conversation.places
        new = next((at for at, place in enumerate(places) if place.startswith("input")), len(places))
        shown = [*with_last_media(conversation.messages[:new], media.known), *conversation.messages[new:]]
        if media.wanted:
            wanted = WarmupInput(
                request_id=f"{own_id}-media",
                messages=shown,
                find_file=self._served.files.for_owner(caller.owner),
                mm_processor_kwargs=body.mm_processor_kwargs or {},
                client=caller.client,
                tenant=caller.tenant,
            )
            try:
                shown = await self._served.manager.load_media(wanted)
            except BadRequestError as error:
                raise conversation.named(error) from None
            # what is known no more is held again
            media.whole = num_media(shown[:new]) > len(media.known)
            media.new = media_in(shown if media.whole else shown[new:])
        return replace(conversation, shown=shown)


@dataclass(kw_only=True, slots=True)
class _Media:
    """The media of one request. wanted: those that are new are to be held. known: the last ones of earlier requests.
    new: those to be held, once they are loaded. whole: these are all of the conversation. session: keeps the KV of the
    conversation; None for its first request."""

    wanted: bool
    known: list[ProcessedMedium] = field(default_factory=list)
    new: list[ProcessedMedium] = field(default_factory=list)
    whole: bool = False
    session: str | None = None


def _encoded(events: Iterable[dict[str, Any]]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (event["type"].encode(), json_text(event)) for event in events)


def _events_of(writer: ResponseWriter, chunks: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for chunk in chunks for event in writer.take(chunk)]


def _base(body: ResponsesRequest, own_id: str, model: str) -> dict[str, Any]:
    """Return the fields of a response that repeat its request."""
    text = body.text.model_dump(by_alias=True, exclude_none=True) if body.text else {}
    reasoning = body.reasoning
    choice = body.tool_choice
    return {
        "id": own_id,
        "object": "response",
        "model": model,
        "created_at": int(time.time()),
        "background": False,
        **{name: getattr(body, name) for name in _REPEATED},
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": reasoning and reasoning.effort, "summary": reasoning and reasoning.summary},
        "service_tier": "default",
        "store": body.store is not False,
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": "auto" if choice is None else choice if isinstance(choice, str) else choice.model_dump(),
        "tools": [tool.model_dump() for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "truncation": body.truncation or "disabled",
    }
