"""POST /tokenize and /detokenize, with vLLM's shapes."""

from __future__ import annotations

from typing import Annotated, Any, Self

from fastapi import Request
from pydantic import Field, WrapValidator, model_validator
from pydantic_core import PydanticCustomError
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import BODY_ERRORS, ID_ERRORS, MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.openai.protocol import Messages, StrictModel, Tool, _keep_raw
from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve.frontend.request_builder import ChatPrompt, GenerateReqInput, TextPrompt
from vlmserve.frontend.sampling import check_token


class TokenizeRequest(StrictModel):
    """A prompt as text, or a conversation with media. add_special_tokens has no effect: Qwen's tokenizers have none to
    add."""

    model: str | None = None
    prompt: str | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    tools: list[Annotated[Tool, WrapValidator(_keep_raw)]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    mm_processor_kwargs: dict[str, Any] | None = None

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt_or_messages", "needs either a prompt or messages")
        return self


class DetokenizeRequest(StrictModel):
    model: str | None = None
    tokens: Annotated[list[int], Field(min_length=0)]


class TokenizedPrompt(TypedDict):
    """The ids of a prompt. token_strs: null without return_token_strs."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizedPrompt(TypedDict):
    prompt: str


@operation(
    *("POST", "/tokenize", "tokenize", "Tokens"),
    request=TokenizeRequest,
    example={"prompt": "Hello"},
    answer=TokenizedPrompt,
    errors=MODEL_ERRORS,
)
async def tokenize(served: ServedModel, request: Request) -> Response:
    """Return the ids of a prompt. Media are loaded, since their size decides how many ids they are."""
    body = await read_body(request, TokenizeRequest, served.settings)
    served.check_name(body.model)
    caller = caller_of(request)
    if body.prompt is not None:
        prompt: TextPrompt | ChatPrompt = TextPrompt(text=body.prompt)
    else:
        open_end = bool(body.continue_final_message)
        prompt = ChatPrompt(
            messages=body.messages or [],  # type: ignore[arg-type]  # kept as the client wrote them
            tool_use=None if not body.tools else ToolUse(tools=body.tools, call_format=served.formats.calls),  # type: ignore[arg-type]
            add_generation_prompt=not open_end if body.add_generation_prompt is None else body.add_generation_prompt,
            continue_final_message=open_end,
            template_kwargs=body.chat_template_kwargs or {},
            find_file=served.files.for_owner(caller.owner),
        )
    wanted = GenerateReqInput(
        request_id=name_answer(request, "tokenize"),
        prompt=prompt,
        mm_processor_kwargs=body.mm_processor_kwargs or {},
        client=caller.client,
        tenant=caller.tenant,
    )
    ids = (await while_connected(request.receive, served.manager.prompt_ids(wanted))).tolist()

    def answer() -> Response:  # of a long prompt it is large
        builder = served.manager.builder
        shown = ids if body.return_token_strs else []
        texts = [builder.tokenizer.token_bytes(i).decode("utf-8", "replace") for i in shown]
        length = builder.limits.max_model_len
        told = {"count": len(ids), "max_model_len": length, "tokens": ids}
        return JSONResponse(told | {"token_strs": texts if body.return_token_strs else None})

    return await served.threads.run(answer)


@operation(
    *("POST", "/detokenize", "detokenize", "Tokens"),
    request=DetokenizeRequest,
    example={"tokens": [1, 2, 3]},
    answer=DetokenizedPrompt,
    errors=(*BODY_ERRORS, *ID_ERRORS),
)
async def detokenize(served: ServedModel, request: Request) -> Response:
    """Return the text of ids, special tokens included."""
    body = await read_body(request, DetokenizeRequest, served.settings)
    served.check_name(body.model)
    builder = served.manager.builder

    def answer() -> Response:
        for token in body.tokens:
            check_token("tokens", token, builder.limits.vocab_size)
        return JSONResponse({"prompt": builder.tokenizer.decode(body.tokens, skip_special_tokens=False)})

    return await served.threads.run(answer)
