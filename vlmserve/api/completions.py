"""POST /v1/completions: answers to texts and token ids, without a chat template."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import JSONResponse, Response

from vlmserve.api.answer_types import TextCompletion, TextCompletionChunk
from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.errors import Error
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import EventStream, ServedModel, while_connected
from vlmserve.frontend.openai.answers import AnswerHead
from vlmserve.frontend.openai.completion_answers import CompletionRequest, CompletionWriter
from vlmserve.frontend.openai.convert import named, sampling_of
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.requests import Caller, GenerateReqInput, TextPrompt, TokensPrompt
from vlmserve.frontend.sampling import MAX_TOP_LOGPROBS, check_range
from vlmserve.ipc.messages import LogitsProcessorCall, ReturnOptions
from vlmserve_common.errors import BadRequestError

_MAX_TOKENS = 16  # OpenAI's, where a request does not say
_MAX_N = 128


@operation(
    *("POST", "/v1/completions", "createCompletion", "Answers"),
    request=CompletionRequest,
    example={"prompt": "Hello", "max_tokens": 16},
    answer=TextCompletion,
    events=TextCompletionChunk | Error,
    ends_with_done=True,
    errors=MODEL_ERRORS,
)
async def complete(served: ServedModel, request: Request) -> Response:
    """Go on from a text, or from token ids. Raises the errors of `errors` before anything has been sent."""
    body = await read_body(request, CompletionRequest, served.settings)
    served.check_name(body.model)
    own_id = name_answer(request, "cmpl", body.rid)
    if body.stream:
        return await EventStream.begin(request.receive, _events(served, body, own_id, caller_of(request)))
    answer = await while_connected(request.receive, whole_completion(served, body, own_id, caller_of(request)))
    if body.logprobs is not None or body.prompt_logprobs is not None or body.return_token_ids:  # they are many
        return await served.threads.run(JSONResponse, answer)
    return JSONResponse(answer)


async def whole_completion(served: ServedModel, body: CompletionRequest, own_id: str, caller: Caller) -> dict[str, Any]:
    """Return the text_completion. own_id: an id that no other request has. Raises the errors of `errors`."""
    with _prompts_named():
        wanted, writer = _prepare(served, body, own_id, caller)
        async with aclosing(served.manager.stream(*wanted)) as batches:
            return await writer.whole(batches)


async def _events(
    served: ServedModel, body: CompletionRequest, own_id: str, caller: Caller
) -> AsyncGenerator[bytes, None]:
    """Yield the events of the stream, as `ServedModel.events` does."""
    with _prompts_named():
        async with aclosing(served.events(partial(_prepare, served, body, own_id, caller))) as events:
            async for some in events:
                yield some


def to_generate_requests(body: CompletionRequest, own_id: str, caller: Caller) -> list[GenerateReqInput]:
    """Return one request for each prompt. Raises BadRequestError for fields that contradict each other or are not
    supported."""
    _check(body)
    asked = (body.prompt_logprobs, body.logprobs if body.echo else None)
    k = max((count for count in asked if count is not None), default=None)
    if k is None and body.echo and body.max_tokens == 0:
        k = 0  # then the prompt is all that is computed
    prompts = prompts_of(body)
    sampling = sampling_of(body.model_copy(update={"max_tokens": _MAX_TOKENS}) if body.max_tokens is None else body)
    calls = tuple(LogitsProcessorCall(name=c.name, params=c.params or {}) for c in body.logits_processors or ())
    return [
        GenerateReqInput(
            prompt=TextPrompt(text=prompt) if isinstance(prompt, str) else TokensPrompt(ids=tuple(prompt)),
            sampling_params=sampling,
            n=body.n or 1,
            num_logprobs=body.logprobs,
            returns=ReturnOptions(prompt_logprobs=k),
            truncate_prompt_tokens=body.truncate_prompt_tokens,
            return_token_ids=bool(body.return_token_ids),
            logits_processors=calls,
            **named(body, own_id if len(prompts) == 1 else f"{own_id}-{index}", caller),
        )
        for index, prompt in enumerate(prompts)
    ]


def prompts_of(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts, each a text or token ids."""
    prompt: Any = body.prompt
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def _prepare(
    served: ServedModel, body: CompletionRequest, own_id: str, caller: Caller
) -> tuple[list[GenerateReqInput], CompletionWriter]:
    tokenizer = served.manager.builder.tokenizer
    wanted = served.adapted(body, to_generate_requests(body, own_id, caller))
    echo = None
    if body.echo:
        echo = [p if isinstance(p, str) else tokenizer.decode(p, skip_special_tokens=False) for p in prompts_of(body)]
    writer = CompletionWriter(
        AnswerHead(id=body.rid or own_id, created=int(time.time()), model=served.name_for(body)),
        tokenizer,
        prompts=len(wanted),
        n=wanted[0].n,
        echo=echo,
        logprobs=body.logprobs,
        prompt_logprobs=body.prompt_logprobs is not None,
        token_ids=bool(body.return_token_ids),
        spec_details=bool(body.return_spec_tokens_details),
        include_usage=bool(body.stream_options and body.stream_options.include_usage),
        hidden_ids=frozenset() if body.skip_special_tokens is False else tokenizer.special_ids,
    )
    return wanted, writer


def _check(body: CompletionRequest) -> None:
    n = 1 if body.n is None else body.n
    if not 1 <= n <= _MAX_N:
        raise invalid_value("n", f"n is {n}; it must be between 1 and {_MAX_N}")
    if body.logprobs is not None:
        check_range("logprobs", body.logprobs, 0, MAX_TOP_LOGPROBS)
    if body.best_of not in (None, n):
        raise _unsupported("best_of", f"best_of {body.best_of} with n {n}: all answers that are made are returned")
    if body.suffix:
        raise _unsupported("suffix", "suffix: Qwen-VL models go on from a text, they do not fill gaps")
    if body.echo and body.truncate_prompt_tokens is not None:
        raise invalid_value("truncate_prompt_tokens", "echo repeats the whole prompt: leave truncate_prompt_tokens out")
    if body.stream_options is not None and not body.stream:
        raise invalid_value("stream_options", "stream_options needs stream: true")
    if body.stream and body.prompt_logprobs is not None:
        raise invalid_value("prompt_logprobs", "prompt_logprobs comes with a whole answer only: leave stream out")
    if body.stream and body.echo and body.logprobs is not None and n > 1:
        raise invalid_value("echo", "echo with logprobs and n above 1 comes with a whole answer only: leave stream out")


@contextmanager
def _prompts_named() -> Iterator[None]:
    """Give errors about a prompt the name that the prompt has in this API."""
    try:
        yield
    except BadRequestError as error:
        if error.param == "messages":
            error.param = "prompt"
        raise


def _unsupported(param: str, what: str) -> BadRequestError:
    return BadRequestError(f"{what} (not supported)", param=param, code="unsupported_parameter")
