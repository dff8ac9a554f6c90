"""Chat completion requests in the engine's form, or the reason why they cannot be served."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from vlmserve.frontend.chat_messages import FindFile
from vlmserve.frontend.openai.completion_answers import CompletionRequest
from vlmserve.frontend.openai.json_bodies import invalid_value
from vlmserve.frontend.openai.protocol import ChatCompletionRequest, NamedRequest, NamedToolChoice
from vlmserve.frontend.parsers.answer import NO_FORMATS, AnswerFormats
from vlmserve.frontend.parsers.calls import Tool, ToolUse
from vlmserve.frontend.requests import NOBODY, Caller, ChatPrompt, GenerateReqInput
from vlmserve.frontend.sampling import MAX_LOGIT_BIAS, SAMPLING_LISTS, check_most
from vlmserve.frontend.structured_output import FORM_FIELDS, grammar_of
from vlmserve.ipc.messages import LogitsProcessorCall, ReturnOptions, SamplingParams
from vlmserve_common.errors import BadRequestError

_SAMPLING = tuple(field.name for field in dataclasses.fields(SamplingParams) if field.name != "max_tokens")
_TOKEN_ID = re.compile(r"[0-9]{1,10}")


def to_generate_request(
    request: ChatCompletionRequest,
    own_id: str,
    caller: Caller = NOBODY,
    *,
    formats: AnswerFormats = NO_FORMATS,
    max_n: int = 128,
    find_file: FindFile,
) -> GenerateReqInput:
    """Convert a chat completion request.

    own_id: an id that no other request has. formats: how the model writes calls and thoughts. max_n: most choices of a
    request. find_file: finds the uploaded files that the client may use. Raises BadRequestError for fields that
    contradict each other or are not supported yet.
    """
    _check_combinations(request)
    _refuse_unsupported(request)
    n = 1 if request.n is None else request.n
    if not 1 <= n <= max_n:
        raise invalid_value("n", f"n is {n}; it must be between 1 and {max_n}")
    continue_final = bool(request.continue_final_message)
    add_generation_prompt = request.add_generation_prompt
    return GenerateReqInput(
        prompt=ChatPrompt(
            messages=request.messages,  # type: ignore[arg-type]  # kept as the client wrote them
            tool_use=tool_use(request, formats),
            reasoning_effort=request.reasoning_effort,
            add_generation_prompt=not continue_final if add_generation_prompt is None else add_generation_prompt,
            continue_final_message=continue_final,
            template_kwargs=request.chat_template_kwargs or {},
            find_file=find_file,
        ),
        sampling_params=sampling_of(request),
        mm_processor_kwargs=request.mm_processor_kwargs or {},
        n=n,
        num_logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        returns=_returns(request),
        truncate_prompt_tokens=request.truncate_prompt_tokens,
        return_token_ids=bool(request.return_token_ids),
        logits_processors=tuple(
            LogitsProcessorCall(name=call.name, params=call.params or {}) for call in request.logits_processors or ()
        ),
        session_id="" if request.session_id is None else f"{caller.owner} {request.session_id}",
        **named(request, own_id, caller),
    )


def named(request: NamedRequest, own_id: str, caller: Caller) -> dict[str, Any]:
    """Return the fields of a `GenerateReqInput` that all requests have. own_id: an id that no other request has."""
    return {
        "request_id": request.rid or own_id,
        "group": own_id,
        "cache_salt": request.cache_salt or "",
        "priority": request.priority or caller.priority,
        "data_parallel_rank": request.data_parallel_rank,
        "timeout_s": request.timeout,
        "client": caller.client,
        "tenant": caller.tenant,
        "ended": caller.ended,
    }


def _returns(request: ChatCompletionRequest) -> ReturnOptions:
    hidden = request.return_hidden_states
    return ReturnOptions(
        prompt_logprobs=request.prompt_logprobs,
        logprob_start_len=request.logprob_start_len or 0,
        token_ids_logprob=tuple(request.token_ids_logprob or ()),
        temp_scaled_logprobs=bool(request.temp_scaled_logprobs),
        top_p_normalized_logprobs=bool(request.top_p_normalized_logprobs),
        hidden_states="none" if not hidden else "all" if hidden is True else hidden,
    )


def sampling_of(request: ChatCompletionRequest | CompletionRequest) -> SamplingParams:
    """Return the request's fields about sampling. Raises BadRequestError."""
    limit = getattr(request, "max_completion_tokens", None)
    limit = request.max_tokens if limit is None else limit
    given: dict[str, Any] = {name: getattr(request, name, None) for name in _SAMPLING}
    given |= {name: tuple(given[name]) for name in SAMPLING_LISTS if given[name] is not None}
    if request.logit_bias is not None:
        given["logit_bias"] = _logit_bias(request.logit_bias)
    given["grammar"] = grammar_of({name: getattr(request, name) for name in FORM_FIELDS})
    return SamplingParams(**{**given, "max_new_tokens": limit})


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    check_most("logit_bias", given, MAX_LOGIT_BIAS, " tokens")
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise invalid_value("logit_bias", f"logit_bias has the key {key[:40]!r}; its keys must be token ids")
    return {int(key): bias for key, bias in given.items()}


def _check_combinations(request: ChatCompletionRequest) -> None:
    if request.top_logprobs is not None and not request.logprobs:
        raise invalid_value("top_logprobs", "top_logprobs needs logprobs: true")
    if request.token_ids_logprob and not request.logprobs and request.prompt_logprobs is None:
        raise invalid_value("token_ids_logprob", "token_ids_logprob needs logprobs: true, or prompt_logprobs")
    for name in ("prompt_logprobs", "return_hidden_states"):
        if request.stream and getattr(request, name) not in (None, False):
            raise invalid_value(name, f"{name} comes with a whole answer only: leave stream out")
    if request.stream_options is not None and not request.stream:
        raise invalid_value("stream_options", "stream_options needs stream: true")
    check_tools(request)


def _refuse_unsupported(request: ChatCompletionRequest) -> None:
    refused = {name: f"{name} is not supported yet" for name in ("prediction", "web_search_options")}
    for name, newer in (("functions", "tools"), ("function_call", "tool_choice")):
        refused[name] = f"{name} is not taken: send {newer}, its later name"
    if request.audio is not None or "audio" in (request.modalities or ()):
        raise BadRequestError("audio output is not supported yet", param="modalities", code="unsupported_parameter")
    for name, why in refused.items():
        if getattr(request, name) is not None:
            raise BadRequestError(why, param=name, code="unsupported_parameter")


def tool_use(request: ChatCompletionRequest, formats: AnswerFormats) -> ToolUse | None:
    """Return how a request's answers may use tools; None if they may not."""
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return None
    return ToolUse(
        tools=request.tools,  # type: ignore[arg-type]  # kept as the client wrote them
        call_format=formats.calls,
        choice="required" if choice == "required" else "auto",
        name=choice.function.name if isinstance(choice, NamedToolChoice) else None,
        parallel=request.parallel_tool_calls is not False,
    )


def check_tools(request: ChatCompletionRequest) -> None:
    """Raise BadRequestError for two tools of one name, and for a tool_choice without such a tool."""
    tools: Sequence[Tool] = request.tools or ()  # type: ignore[assignment]
    names = [tool["function"]["name"] for tool in tools]
    seen = set[str]()
    for index, name in enumerate(names):
        if name in seen:
            place = f"tools[{index}].function.name"
            raise invalid_value(place, f"{place} is {name!r}, as another tool is called: each needs a name of its own")
        seen.add(name)
    choice = request.tool_choice
    if isinstance(choice, NamedToolChoice) and choice.function.name not in names:
        what = f"tool_choice names the function {choice.function.name!r}, which is not among the tools {names}"
        raise invalid_value("tool_choice", what)
    if choice == "required" and not names:
        raise invalid_value("tool_choice", "tool_choice required needs tools")
