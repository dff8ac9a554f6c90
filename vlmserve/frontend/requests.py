"""Requests as the API and the offline `LLM` make them: a prompt in one of four forms, and the options for its
answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import InitVar, dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from processors.hashing import digest_fields
from vlmserve.frontend.chat_messages import FindFile, MediaRef, Message
from vlmserve.frontend.parsers.calls import ToolUse
from vlmserve.frontend.request_stats import RequestStats
from vlmserve.frontend.tasks import TaskName
from vlmserve.ipc.messages import InputEmbeds, RequestOptions, SamplingParams
from vlmserve_common.checkpoint.adapter_ref import AdapterRef
from vlmserve_common.errors import BadRequestError


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatPrompt:
    """A conversation in OpenAI's form (plain dicts), to be rendered by the chat template.

    find_file: finds the uploaded files that it names; None where there are no such files. tool_use: None without tools.
    reasoning_effort: how much the model is to think; None leaves that to the model. add_special_tokens: add those of
    the tokenizer (see `TextTokenizer.encode`). open_ended: the prompt ends within the user's last message, which later
    prompts go on with.
    """

    messages: Sequence[Mapping[str, Any]]
    tool_use: ToolUse | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    find_file: FindFile | None = None
    add_special_tokens: bool = False
    open_ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TextPrompt:
    """A prompt that is rendered already; media[i] stands at its i-th media placeholder. add_special_tokens: see
    `ChatPrompt`."""

    text: str
    media: tuple[MediaRef, ...] = ()
    add_special_tokens: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class TokensPrompt:
    """A prompt that is tokenised already, without media."""

    ids: tuple[int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedsPrompt:
    """A prompt given as embeddings in place of tokens (see `read_input_embeds`)."""

    embeds: InputEmbeds


Prompt: TypeAlias = ChatPrompt | TextPrompt | TokensPrompt | EmbedsPrompt


@dataclass(frozen=True, kw_only=True, slots=True)
class Slid:
    """Says where the KV of a conversation is, of which a part in the middle has left. forms: its messages before, and
    after each clip but the last that has become shorter, or has left. cache_salt: of requests about the first form."""

    forms: tuple[Sequence[Message], ...]
    cache_salt: str


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerateReqInput(RequestOptions):
    """A request for n answers to one prompt. sampling_params, returns and the rest of `RequestOptions` go on to the
    scheduler with each answer.

    request_id: the id that the client sees and aborts by, unique among requests under way. group: the engine's unique
    id of the request; "" takes the request_id. mm_processor_kwargs: how media are prepared where a part does not say
    (`processors.families.processor_kwargs`). continuations: texts to score instead of making answers. The logprobs of
    each text's tokens behind the prompt come as the `prompt_logprobs` of a choice of its own. tenant: only requests
    with the same tenant share cached prefixes and media; "" is a tenant, too. truncate_prompt_tokens: keep so many of
    the prompt's last tokens; -1: as many as leave room for the answer. truncation_side: "right" keeps its first ones.
    return_token_ids: outputs have the prompt's ids. timeout_s: seconds that the request may take; None is no limit.
    ended: called with the outcome of each choice. warnings: sentences for the answer about fields that will have no
    effect. slid: the KV of what stays of a chat is not computed again. task: what is asked of the model. place: where
    the prompt stands in its client's request, such as "input[3]", for errors; "": errors name places themselves.
    sampling: an older name of sampling_params.
    """

    request_id: str
    prompt: Prompt
    n: int = 1
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    continuations: tuple[str, ...] = ()
    tenant: str = ""
    truncate_prompt_tokens: int | None = None
    truncation_side: Literal["left", "right"] = "left"
    return_token_ids: bool = False
    timeout_s: float | None = None
    ended: Callable[[RequestStats], None] | None = None
    warnings: tuple[str, ...] = ()
    slid: Slid | None = None
    task: TaskName = "generate"
    place: str = ""
    sampling: InitVar[SamplingParams | None] = None

    def __post_init__(self, sampling: SamplingParams | None) -> None:
        if sampling is not None:
            object.__setattr__(self, "sampling_params", sampling)

    @property
    def cache_namespace(self) -> str:
        """Return the salt of the prefix cache: the client's salt within its tenant, and its adapter. Two tenants never
        get the same, nor do two adapters."""
        salt = (
            f"{len(self.tenant)} {self.tenant} {self.cache_salt}"
            if self.tenant
            else self.cache_salt and f"0 {self.cache_salt}"
        )
        return salt if self.adapter is None else f"lora {self.adapter.digest} {salt}"

    @property
    def num_choices(self) -> int:
        """Return the number of answers to make, or of continuations to score."""
        return len(self.continuations) or self.n


@contextmanager
def placed(place: str) -> Iterator[None]:
    """Let errors about a prompt name its place in the client's request, unless it is ""."""
    try:
        yield
    except BadRequestError as error:
        if place and (error.param is None or error.param.startswith(("messages", "prompt"))):
            if error.param and error.message.startswith(f"{error.param} "):
                error.message = place + error.message.removeprefix(error.param)
            error.param = place
        raise


@dataclass(frozen=True, kw_only=True, slots=True)
class Caller:
    """The caller of an endpoint: a client, or a batch that a client left here.

    client: takes turns with other clients; it is the key's name, or the API key and the address. owner: files, sessions
    and stored answers belong to it. tenant: shares cached prefixes and media with no other one; "" without one.
    ended: gets the statistics of each choice. priority: the priority of requests that have none; lower goes first.
    unattended: nobody reads its answers before they are whole.
    """

    client: str = ""
    owner: str = ""
    tenant: str = ""
    ended: Callable[[RequestStats], None] | None = None
    priority: int = 0
    unattended: bool = False


NOBODY = Caller()


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmupInput:
    """Media to encode ahead of time: those of a conversation in OpenAI's form (plain dicts).

    find_file, mm_processor_kwargs, client, tenant, adapter: as of a `GenerateReqInput`. pin: never evict their
    embeddings from the disk.
    """

    request_id: str
    messages: Sequence[Message]
    find_file: FindFile | None = None
    mm_processor_kwargs: Mapping[str, Any] = field(default_factory=dict)
    pin: bool = False
    client: str = ""
    tenant: str = ""
    adapter: AdapterRef | None = None


_PARAM = "input_embeds"


def read_input_embeds(given: Any) -> InputEmbeds:
    """Read embeddings that a caller gives. given: [L, hidden], a numpy array of floats or a torch tensor of float32,
    bfloat16 or float16, which float32 holds as they are. Raises BadRequestError for anything else, and for values that
    are not finite."""
    if type(given).__module__ == "torch" and hasattr(given, "detach"):
        given = given.detach().cpu().float().numpy() if given.is_floating_point() else given.detach().cpu().numpy()
    if not isinstance(given, np.ndarray) or given.dtype.kind != "f" or given.ndim != 2:
        kind = f"an array of {given.dtype}, {list(given.shape)}" if isinstance(given, np.ndarray) else type(given)
        raise _refusal(f"is {kind}; it must be a tensor of floats, [tokens, hidden size]")
    rows = np.ascontiguousarray(given, dtype=np.float32)
    if not np.isfinite(rows).all():
        bad = int(np.flatnonzero(~np.isfinite(rows).all(axis=1))[0])
        raise _refusal(f"has a value in row {bad} that is not finite in float32")
    digests = [np.frombuffer(digest_fields([b"vlmserve input embeds 1", row.data]), dtype=np.uint8) for row in rows]
    return InputEmbeds(rows=rows, digests=np.stack(digests) if digests else np.zeros((0, 32), dtype=np.uint8))


def check_input_embeds(rows: np.ndarray, *, hidden_size: int) -> None:
    """BadRequestError unless rows are as wide as the model's."""
    if rows.shape[1] != hidden_size:
        raise _refusal(f"has rows of {rows.shape[1]} elements; the model's hidden size is {hidden_size}")


def _refusal(what: str) -> BadRequestError:
    return BadRequestError(f"{_PARAM} {what}", param=_PARAM, code="invalid_value")
