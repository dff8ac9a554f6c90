"""/v1/sessions: conversations that the server holds. Clients send what is new, and each medium is prepared once.

What is appended is loaded, encoded and computed at once. A question then waits for its own few tokens alone.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from processors.processed import ProcessedVideo
from vlmserve.api.answer_types import ChatCompletion, ChatCompletionChunk
from vlmserve.api.body import check_items, read_body
from vlmserve.api.callers import caller_of, owner_of
from vlmserve.api.chat import prepare_chat
from vlmserve.api.errors import Error
from vlmserve.api.openapi import BODY_ERRORS, ID_ERRORS, MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import DONE, EventStream, ServedModel, parsed_events, while_connected
from vlmserve.api.sessions.held import HeldSession, HeldSessions
from vlmserve.api.sessions.live import Frame, Seen
from vlmserve.api.sessions.protocol import (
    AppendedSession,
    AppendRequest,
    AppendUsage,
    AskRequest,
    DeletedSession,
    LiveOptions,
    SessionList,
    SessionObject,
    SessionRequest,
)
from vlmserve.api.tracing import asked_of
from vlmserve.frontend.chat_messages import Message
from vlmserve.frontend.dialogue import Dialogue
from vlmserve.frontend.live import SLID, LiveRules, Units
from vlmserve.frontend.openai.answers import AnswerWriter, joined_deltas
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.openai.protocol import ChatCompletionRequest, ChatOptions
from vlmserve.frontend.requests import Caller, ChatPrompt, GenerateReqInput, Slid, WarmupInput
from vlmserve.ipc.messages import SamplingParams
from vlmserve_common.errors import BadRequestError

# fields of questions that a session has values for
_OF_SESSION = ("model", "lora_path", "tools", "chat_template_kwargs", "mm_processor_kwargs", "cache_salt")
_NEW = "messages[0].content"
"""The place of what is new among messages of its own."""


class SessionsApi:
    """The endpoints under /v1/sessions. A session belongs to the API key that opened it."""

    def __init__(self, served: ServedModel, sessions: HeldSessions) -> None:
        self._served = served
        self._sessions = sessions

    @operation(
        *("POST", "/v1/sessions", "createSession", "Sessions"),
        request=SessionRequest,
        example={"system": "Be brief."},
        needs_body=False,
        answer=SessionObject,
        errors=(*BODY_ERRORS, *ID_ERRORS, 429),
    )
    async def create(self, request: Request) -> Response:
        """Open a session, whose conversation is empty but for a system message."""
        body = await read_body(request, SessionRequest, self._served.settings, if_empty=b"{}")
        found = self._served.adapter_of(body.model, body.lora_path)
        if body.live is not None:
            self.live_rules(body.live)
        dialogue = Dialogue()
        if body.system is not None:
            reserved = self._served.manager.builder.placeholders
            if any(word in body.system for word in reserved):
                raise invalid_value("system", f"system contains one of {reserved}, which stand for media")
            dialogue = dialogue.with_message({"role": "system", "content": body.system})
        session = self._sessions.open(owner_of(request), body, self._served.name if found is None else found.name)
        try:
            self._sessions.reserve(session, dialogue)
        except BadRequestError:
            self._sessions.delete(session.owner, session.id)
            raise
        self._sessions.keep(session, dialogue, 0)
        return JSONResponse(session.describe())

    @operation("GET", "/v1/sessions", "listSessions", "Sessions", answer=SessionList)
    async def list_open(self, request: Request) -> Response:
        """List the open sessions."""
        data = [session.describe() for session in self._sessions.of(owner_of(request))]
        return JSONResponse({"object": "list", "data": data})

    @operation("GET", "/v1/sessions/{session_id}", "getSession", "Sessions", answer=SessionObject, errors=ID_ERRORS)
    async def retrieve(self, request: Request, session_id: str) -> Response:
        """Describe a session."""
        return JSONResponse(self._sessions.find(owner_of(request), session_id).describe())

    @operation(
        "DELETE", "/v1/sessions/{session_id}", "deleteSession", "Sessions", answer=DeletedSession, errors=ID_ERRORS
    )
    async def delete(self, request: Request, session_id: str) -> Response:
        """Forget a session."""
        self._sessions.delete(owner_of(request), session_id)
        return JSONResponse({"id": session_id, "object": "session", "deleted": True})

    @operation(
        *("POST", "/v1/sessions/{session_id}/append", "appendToSession", "Sessions"),
        request=AppendRequest,
        example={"content": "The first page:"},
        answer=AppendedSession,
        errors=MODEL_ERRORS,
    )
    async def append(self, request: Request, session_id: str) -> Response:
        """Add to a session's conversation. The answer comes when all of it is encoded and computed."""
        body = await read_body(request, AppendRequest, self._served.settings)
        own_id, caller = name_answer(request, "append"), caller_of(request)
        appended = await while_connected(request.receive, self._append(session_id, body, own_id, caller))
        return JSONResponse(appended)

    @operation(
        *("POST", "/v1/sessions/{session_id}/ask", "askSession", "Sessions"),
        request=AskRequest,
        example={"content": "What is this?", "max_tokens": 64},
        answer=ChatCompletion,
        events=ChatCompletionChunk | Error,
        ends_with_done=True,
        errors=MODEL_ERRORS,
    )
    async def ask(self, request: Request, session_id: str) -> Response:
        """Answer a question about a session's conversation, whole or as a stream."""
        body = await read_body(request, AskRequest, self._served.settings)
        self._served.check_name(body.model)
        if body.keep is not False and (body.n or 1) > 1:
            raise invalid_value("n", f"n is {body.n}, but one answer can stay in a session: send keep: false")
        own_id, caller = name_answer(request, "chatcmpl", body.rid), caller_of(request)
        request.state.asked = asked_of(body)
        if body.stream:
            return await EventStream.begin(request.receive, self._events(session_id, body, own_id, caller))
        answer = await while_connected(request.receive, self.whole(session_id, body, own_id, caller))
        return await self._served.threads.run(JSONResponse, answer)

    async def _append(self, session_id: str, body: AppendRequest, own_id: str, caller: Caller) -> AppendedSession:
        async with self._sessions.changed(caller.owner, session_id, self._seen(caller, session_id)) as session:
            own = body.content is None
            messages = body.messages if own else [{"role": "user", "content": body.content}]
            loaded = await self._load(session, messages or [], body.mm_processor_kwargs, own_id, caller, own=own)
            dialogue = session.dialogue
            for message in loaded:
                dialogue = dialogue.with_message(message) if own else dialogue.with_content(message["content"])
            self._sessions.reserve(session, dialogue)
            usage = await self.compute(session, dialogue, own_id, caller)
            return AppendedSession(session=session.describe(), usage=usage)

    def _seen(self, caller: Caller, session_id: str) -> Seen | None:
        """Return the frames that have come so far; None without live video."""
        live = self._sessions.find(caller.owner, session_id).live
        return None if live is None else live.seen()

    def live_rules(self, wanted: LiveOptions) -> LiveRules:
        """Return how frames become live video. Raises BadRequestError."""
        return self._served.manager.live_rules(
            wanted.fps,
            keep_seconds=wanted.keep_seconds,
            max_tokens=wanted.max_tokens,
            slides=wanted.window == "sliding",
        )

    async def load_frames(
        self,
        session: HeldSession,
        files: Sequence[bytes | Units],
        own_id: str,
        caller: Caller,
    ) -> ProcessedVideo:
        """Return the frames of one temporal patch, processed. Raises BadRequestError."""
        assert session.live is not None
        kwargs = session.about.mm_processor_kwargs or {}
        part = session.live.rules.part(files, sized=bool(kwargs))
        wanted = WarmupInput(
            request_id=own_id,
            messages=[{"role": "user", "content": [part]}],
            mm_processor_kwargs=kwargs,
            client=caller.client,
            tenant=caller.tenant,
        )
        try:
            [message] = await self._served.manager.load_media(wanted)
        except BadRequestError as error:
            raise BadRequestError(
                error.message.replace(f"{_NEW}[0].", ""), code=error.code, status=error.status
            ) from None
        video: ProcessedVideo = message["content"][0]["video"]
        return video

    async def _load(
        self,
        session: HeldSession,
        messages: list[Any],
        kwargs: dict[str, Any] | None,
        own_id: str,
        caller: Caller,
        *,
        own: bool = False,
    ) -> list[Message]:
        """Return new messages with processed media. own: they are the client's, and not made of content."""
        try:
            check_items({"messages": messages}, self._served.settings)
            wanted = WarmupInput(
                request_id=f"{own_id}-media",
                messages=messages,
                find_file=self._served.files.for_owner(caller.owner),
                mm_processor_kwargs=kwargs or session.about.mm_processor_kwargs or {},
                client=caller.client,
                tenant=caller.tenant,
            )
            return await self._served.manager.load_media(wanted)
        except BadRequestError as error:
            raise error if own else _about_content(error) from None

    async def compute(
        self, session: HeldSession, dialogue: Dialogue, own_id: str, caller: Caller, slid: Slid | None = None
    ) -> AppendUsage:
        """Encode and compute a conversation up to its end, so that questions find it done; and keep it. slid: where KV
        of it is already. Raises BadRequestError."""
        chat = self._chat(session, dialogue, ChatOptions())
        try:
            [wanted], _ = prepare_chat(self._served, chat, own_id, caller)
            assert isinstance(wanted.prompt, ChatPrompt)
            prompt = replace(wanted.prompt, open_ended=True, add_generation_prompt=False)
            wanted = replace(wanted, prompt=prompt, sampling_params=SamplingParams(max_new_tokens=0), slid=slid)
            async with aclosing(self._served.manager.generate(wanted)) as outputs:
                async for item in outputs:
                    last = item.output
        except BadRequestError as error:
            raise _about_content(error) from None
        self._check_length(last.prompt_tokens)
        self._sessions.check_there(session)
        self._sessions.keep(session, dialogue, last.prompt_tokens)
        return AppendUsage(prompt_tokens=last.prompt_tokens, cached_tokens=last.cached_tokens)

    def _check_length(self, tokens: int) -> None:
        limit = self._served.settings.max_open_session_tokens
        if limit is not None and tokens > limit:
            raise BadRequestError(
                f"the session would have {tokens} tokens, the limit is {limit} (setting --max-open-session-tokens)",
                param="content",
                code="context_length_exceeded",
            )

    def _chat(self, session: HeldSession, dialogue: Dialogue, options: ChatOptions) -> ChatCompletionRequest:
        """Return a chat request about a conversation. Fields that the options leave out are the session's."""
        check_items({"messages": [*dialogue.messages]}, self._served.settings)
        given = {name: getattr(options, name) for name in ChatOptions.model_fields}
        given |= {name: getattr(session.about, name) for name in _OF_SESSION if given[name] is None}
        given["cache_salt"] = dialogue.salt(given["cache_salt"])
        return ChatCompletionRequest.model_construct(**given, messages=[*dialogue.messages], session_id=session.id)

    async def _question(
        self, session: HeldSession, body: AskRequest, own_id: str, caller: Caller, seen: Seen | None
    ) -> tuple[Dialogue, ChatCompletionRequest]:
        """Return a session's conversation with a question, and the request for its answer. seen: what the question
        sees of live video."""
        dialogue = session.dialogue
        if seen is not None and (odd := seen.missing):
            dialogue = await self._with_odd(session, odd, own_id, caller)
        if body.content is not None:
            messages = [{"role": "user", "content": body.content}]
            [asked] = await self._load(session, messages, body.mm_processor_kwargs, own_id, caller)
            dialogue = dialogue.with_content(asked["content"])
        if not dialogue.messages:
            raise BadRequestError("the session is empty, and there is no question", param="content")
        return dialogue, self._chat(session, dialogue, body)

    def _prepared(
        self, dialogue: Dialogue, chat: ChatCompletionRequest, own_id: str, caller: Caller
    ) -> tuple[list[GenerateReqInput], AnswerWriter]:
        wanted, writer = prepare_chat(self._served, chat, own_id, caller)
        if dialogue.window:
            wanted = [replace(one, warnings=(*one.warnings, SLID)) for one in wanted]
        return wanted, writer

    async def _with_odd(self, session: HeldSession, odd: Sequence[Frame], own_id: str, caller: Caller) -> Dialogue:
        """Return a session's conversation with frames that are less than a temporal patch. So a video that ends is
        computed, too."""
        live = session.live
        assert live is not None

        async def load(files: Sequence[bytes | Units]) -> ProcessedVideo:
            return await self.load_frames(session, files, f"{own_id}-frames", caller)

        return live.rules.shown(session.dialogue, await live.loaded(odd, load))

    async def whole(self, session_id: str, body: AskRequest, own_id: str, caller: Caller) -> dict[str, Any]:
        """Return a whole answer. Raises the errors of `errors`."""
        seen = self._seen(caller, session_id)
        async with self._sessions.asked(caller.owner, session_id, seen, keep=body.keep is not False) as session:
            dialogue, chat = await self._question(session, body, own_id, caller, seen)
            if body.keep is not False:
                self._sessions.reserve(session, dialogue)
            try:
                wanted, writer = self._prepared(dialogue, chat, own_id, caller)
                async with aclosing(self._served.manager.generate(*wanted)) as outputs:
                    answer = await writer.whole(outputs)
            except BadRequestError as error:
                raise _about_content(error) from None
            if body.keep is not False:
                [choice] = answer["choices"]
                self._keep(session, dialogue, choice["message"], writer.total_tokens)
            return answer

    async def _events(
        self, session_id: str, body: AskRequest, own_id: str, caller: Caller
    ) -> AsyncGenerator[bytes, None]:
        keep, deltas, failed = body.keep is not False, list[dict[str, Any]](), False
        seen = self._seen(caller, session_id)
        async with self._sessions.asked(caller.owner, session_id, seen, keep=keep) as session:
            dialogue, chat = await self._question(session, body, own_id, caller, seen)
            if keep:
                self._sessions.reserve(session, dialogue)
            wanted, writer = self._prepared(dialogue, chat, own_id, caller)
            async with aclosing(self._served.events(lambda: (wanted, writer))) as events:
                try:
                    async for some in events:
                        if keep and some != DONE:
                            for chunk in parsed_events(some):
                                failed |= "error" in chunk
                                deltas += [choice["delta"] for choice in chunk.get("choices", ())]
                        elif keep and not failed:  # before the client knows that the answer has ended
                            self._keep(session, dialogue, joined_deltas(deltas), writer.total_tokens)
                        yield some
                except BadRequestError as error:
                    raise _about_content(error) from None

    def _keep(self, session: HeldSession, dialogue: Dialogue, message: Message, tokens: int) -> None:
        if session.live is not None:
            session.live.keep()
        said = {name: value for name, value in message.items() if value is not None}
        self._sessions.keep(session, dialogue.with_message({"content": "", **said}), tokens)


def _about_content(error: BadRequestError) -> BadRequestError:
    """Return an error about messages as one about the content that was sent."""
    param = error.param and error.param.replace(_NEW, "content")
    if param and param.startswith("messages"):
        param = "content"
    message = error.message.replace(_NEW, "content")
    return BadRequestError(message, param=param, code=error.code, status=error.status)
