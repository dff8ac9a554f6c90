"""POST /generate, as SGLang has it: trainers' rollouts send token ids there, and want logprobs and versions back."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from fastapi import Request
from pydantic import Field
from starlette.responses import JSONResponse, Response
from typing_extensions import TypedDict

from vlmserve.api.body import read_body
from vlmserve.api.callers import caller_of
from vlmserve.api.openapi import MODEL_ERRORS, operation
from vlmserve.api.pooling.contents import media_part
from vlmserve.api.request_id import name_answer
from vlmserve.api.served_model import ServedModel, while_connected
from vlmserve.frontend.chat_messages import to_template_messages
from vlmserve.frontend.live_requests import RequestAbortedError
from vlmserve.frontend.openai.answers import finite
from vlmserve.frontend.openai.convert import named
from vlmserve.frontend.openai.protocol import NamedRequest, Stop, StrictModel
from vlmserve.frontend.requests import Caller, GenerateReqInput, TextPrompt, TokensPrompt
from vlmserve.frontend.structured_output import grammar_of
from vlmserve.ipc.messages import FinishReason, PromptLogprobs, ReturnOptions, SamplingParams, TokenOutput
from vlmserve_common.errors import BadRequestError

_MOST_N, _MAX_NEW_TOKENS = 128, 128  # the second is SGLang's, where a request does not say
_FORMS = ("json_schema", "regex", "ebnf")
_Ids = Annotated[list[int], Field(min_length=1)]


class SglangSampling(StrictModel):
    """How answers are sampled, under SGLang's names. spaces_between_special_tokens: without effect."""

    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=_MOST_N)] = 1
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    sampling_seed: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    no_stop_trim: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    json_schema: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    ebnf: str | None = None


class GenerateBody(NamedRequest):
    """The body of POST /generate. text, input_ids: one prompt, or several; one of the two. image_data: of one prompt,
    URLs or base64. logprob_start_len: from this token of the prompt on; -1: none of the prompt."""

    text: str | Annotated[list[str], Field(min_length=1)] | None = None
    input_ids: _Ids | Annotated[list[_Ids], Field(min_length=1)] | None = None
    image_data: str | list[str] | None = None
    sampling_params: SglangSampling = SglangSampling()
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1)] = -1
    top_logprobs_num: int = 0
    token_ids_logprob: list[int] | None = None
    return_text_in_logprobs: bool = False
    stream: Literal[False] = False


class GenerateMeta(TypedDict, total=False):
    """About an answer. Logprobs are lists of [logprob, token id, text or null]. weight_version: at its end."""

    id: str
    finish_reason: dict[str, Any]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    weight_version: str
    e2e_latency: float
    input_token_logprobs: list[list[Any]]
    output_token_logprobs: list[list[Any]]
    output_top_logprobs: list[list[list[Any]]]
    output_token_ids_logprobs: list[list[list[Any]]]


class Generated(TypedDict):
    text: str
    output_ids: list[int]
    meta_info: GenerateMeta


@operation(
    *("POST", "/generate", "generate", "Answers"),
    request=GenerateBody,
    example={"text": "Hello", "sampling_params": {"max_new_tokens": 16}},
    answer=Generated | list[Generated],
    errors=MODEL_ERRORS,
)
async def generate(served: ServedModel, request: Request) -> Response:
    """Go on from a text, or from token ids, in SGLang's form. Answers that an operator aborts are given as far as they
    are there. Raises the errors of `errors`."""
    body = await read_body(request, GenerateBody, served.settings)
    name, caller = name_answer(request, "gen", body.rid), caller_of(request)
    wanted = served.adapted(body, await served.threads.run(_requests, served, body, name, caller))
    parts = await while_connected(request.receive, _answered(served, wanted))
    found = await served.threads.run(_written, served, body, wanted, parts)
    several = isinstance(body.text, list) or isinstance((body.input_ids or [0])[0], list) or wanted[0].n > 1
    return await served.threads.run(JSONResponse, found if several else found[0])


def _requests(served: ServedModel, body: GenerateBody, name: str, caller: Caller) -> list[GenerateReqInput]:
    if (body.text is None) == (body.input_ids is None):
        raise BadRequestError("give either text or input_ids", param="text")
    given: Any = body.text if body.text is not None else body.input_ids
    several = isinstance(given, list) and not isinstance(given[0], int)
    prompts: list[Any] = given if several else [given]
    images = [body.image_data] if isinstance(body.image_data, str) else body.image_data or []
    if images and len(prompts) > 1:
        raise BadRequestError("image_data goes with one prompt: send several requests", param="image_data")
    asked = body.return_logprob
    of_prompt = asked and body.logprob_start_len >= 0
    returns = ReturnOptions(
        prompt_logprobs=0 if of_prompt else None,
        logprob_start_len=max(0, body.logprob_start_len),
        token_ids_logprob=tuple(body.token_ids_logprob or ()) if asked else (),
    )
    return [
        GenerateReqInput(
            prompt=_prompt(served, prompt, images),
            sampling_params=_sampling(body.sampling_params),
            n=body.sampling_params.n,
            num_logprobs=body.top_logprobs_num if asked else None,
            returns=returns,
            **named(body, name if len(prompts) == 1 else f"{name}-{index}", caller),
        )
        for index, prompt in enumerate(prompts)
    ]


def _prompt(served: ServedModel, prompt: str | list[int], images: Sequence[str]) -> TextPrompt | TokensPrompt:
    """Return a prompt. Token ids with pictures become a text, as pads of any number may stand for a picture there."""
    if not images:
        return TextPrompt(text=prompt) if isinstance(prompt, str) else TokensPrompt(ids=tuple(prompt))
    if not isinstance(prompt, str):
        prompt = served.manager.builder.tokenizer.decode(prompt, skip_special_tokens=False)
    parts = [media_part("image", one) for one in images]
    _, media = to_template_messages([{"role": "user", "content": parts}])
    refs = tuple(replace(one, param=f"image_data[{at}]") for at, one in enumerate(media))
    pad = next(iter(served.manager.builder.placeholders), "<|image_pad|>")  # of pictures
    text = re.sub(f"(?:{re.escape(pad)})+", pad, prompt)
    if text.count(pad) != len(refs):
        told = f"{len(refs)} pictures, and the prompt has places for {text.count(pad)} ({pad})"
        raise BadRequestError(f"image_data has {told}", param="image_data")
    return TextPrompt(text=text, media=refs)


def _sampling(given: SglangSampling) -> SamplingParams:
    same = ("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
    named_so: dict[str, Any] = {name: getattr(given, name) for name in (*same, "ignore_eos", "skip_special_tokens")}
    return SamplingParams(
        max_new_tokens=_MAX_NEW_TOKENS if given.max_new_tokens is None else given.max_new_tokens,
        min_tokens=given.min_new_tokens or 0,
        seed=given.sampling_seed,
        stop=tuple(given.stop or ()),
        stop_token_ids=tuple(given.stop_token_ids or ()),
        include_stop_str_in_output=bool(given.no_stop_trim),
        grammar=grammar_of({name: getattr(given, name) for name in _FORMS}),
        **named_so,
    )


@dataclass(slots=True)
class _Part:
    """One answer so far. reason: why it ended; None: it was aborted."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    prompt: PromptLogprobs | None = None
    reason: FinishReason | None = None
    seconds: float = 0.0
    version: str = ""


async def _answered(served: ServedModel, wanted: Sequence[GenerateReqInput]) -> list[_Part]:
    parts = [_Part() for request in wanted for _ in range(request.n)]
    began = time.monotonic()
    try:
        async with aclosing(served.manager.stream(*wanted)) as batches:
            async for items in batches:
                for item in items:
                    part, output = parts[item.index], item.output
                    part.text += output.text
                    part.ids += output.token_ids
                    part.outputs.append(output)
                    part.prompt = output.prompt_logprobs or part.prompt
                    part.reason, part.seconds = output.finish_reason, time.monotonic() - began
                    part.version = served.manager.weight_version
    except RequestAbortedError:  # what is there counts
        pass
    return parts


def _written(
    served: ServedModel, body: GenerateBody, wanted: Sequence[GenerateReqInput], parts: Sequence[_Part]
) -> list[Generated]:
    name = wanted[0].request_id
    return [_answer(served, body, f"{name}-{at}" if at else name, part) for at, part in enumerate(parts)]


def _answer(served: ServedModel, body: GenerateBody, name: str, part: _Part) -> Generated:
    last = part.outputs[-1] if part.outputs else None
    meta: GenerateMeta = {
        "id": name,
        "finish_reason": _reason(part),
        "prompt_tokens": last.prompt_tokens if last else 0,
        "completion_tokens": last.completion_tokens if last else 0,
        "cached_tokens": last.cached_tokens if last else 0,
        "weight_version": part.version or served.manager.weight_version,
        "e2e_latency": round(part.seconds, 6),
    }
    if body.return_logprob:
        meta |= _logprobs(served, body, part)
    return {"text": part.text, "output_ids": part.ids, "meta_info": meta}


def _reason(part: _Part) -> dict[str, Any]:
    if part.reason is None:
        return {"type": "abort", "message": "the request was aborted by an operator"}
    if part.reason.type == "length":
        return {"type": "length", "length": len(part.ids)}
    return {"type": part.reason.type, "matched": part.reason.matched}


def _logprobs(served: ServedModel, body: GenerateBody, part: _Part) -> GenerateMeta:
    tokenizer, texts = served.manager.builder.tokenizer, body.return_text_in_logprobs

    def entry(logprob: float | None, token: int) -> list[Any]:
        text = tokenizer.decode([token], skip_special_tokens=False) if texts else None
        return [None if logprob is None else finite(logprob), token, text]

    def entries(tokens: Sequence[int], logprobs: Sequence[float]) -> list[list[Any]]:
        return [entry(logprob, token) for token, logprob in zip(tokens, logprobs, strict=True)]

    made = [one for output in part.outputs for one in output.logprobs or ()]
    found: GenerateMeta = {
        "input_token_logprobs": [],
        "output_token_logprobs": [entry(one.logprob, one.token_id) for one in made],
    }
    if part.prompt is not None:
        given = entries(part.prompt.token_ids.tolist(), part.prompt.logprobs.tolist())
        found["input_token_logprobs"] = [[None, *given[0][1:]], *given[1:]] if part.prompt.start == 0 else given
    if body.top_logprobs_num:
        found["output_top_logprobs"] = [entries(one.top_ids, one.top_logprobs) for one in made]
    if body.token_ids_logprob:
        found["output_token_ids_logprobs"] = [entries(body.token_ids_logprob, one.token_ids_logprobs) for one in made]
    return found
