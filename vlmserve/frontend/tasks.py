"""What a checkpoint is served for: answers, embeddings or scores of documents, as its files say.

The files are those of Sentence Transformers: modules.json, the folder of each module, config_sentence_transformers.json
and additional_chat_templates/reranker.jinja.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias

from vlmserve.frontend.chat_template import ChatTemplate, PairTemplate, load_chat_template
from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer
from vlmserve_common.errors import BadRequestError, CheckpointError

TaskName: TypeAlias = Literal["generate", "embed", "rerank"]
PoolingName: TypeAlias = Literal["last", "mean"]

_POOLINGS: Mapping[str, PoolingName] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
_OLD_PREFIX = "pooling_mode_"
_DOES = {
    "generate": "gives answers (POST /v1/chat/completions), no embeddings and no scores of documents",
    "embed": "makes embeddings (POST /v1/embeddings), and gives no answers",
    "rerank": "scores documents (POST /v1/rerank or /v1/score), and gives no answers",
}
# The published prompt, for a checkpoint without a template of its own.
_RERANKER = """
{%- macro show(content) -%}
{%- if content is string -%}{{- content -}}{%- else -%}{%- for part in content -%}
{%- if part.type == 'text' -%}{{- part.text -}}
{%- else -%}{{- '<|vision_start|><|' + part.type + '_pad|><|vision_end|>' -}}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- endmacro -%}
{%- set instruct = 'Given a search query, retrieve relevant candidates that answer the query.' -%}
{%- if messages[0].role == 'system' -%}{%- set instruct = show(messages[0].content) -%}{%- endif -%}
{{- '<|im_start|>system\\nJudge whether the Document meets the requirements based on the Query and the Instruct ' -}}
{{- 'provided. Note that the answer can only be "yes" or "no".<|im_end|>\\n<|im_start|>user\\n<Instruct>: ' -}}
{{- instruct + '<Query>:' + show(messages[-2].content) + '\\n<Document>:' + show(messages[-1].content) -}}
{{- '<|im_end|>\\n' -}}{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """The task of a served model.

    pooling, normalize: how vectors are made, see `ipc.messages.Pooling`. dimensions: the numbers of dimensions that it
    was trained for; none: any. templated: a text to embed is the message of a user, not the whole prompt. prompts:
    instructions by their names; instruction: where a request brings none, "" for none. labels: the ids of the tokens
    for a relevant document and for one that is not.
    """

    name: TaskName = "generate"
    pooling: PoolingName = "last"
    normalize: bool = True
    dimensions: tuple[int, ...] = ()
    templated: bool = False
    prompts: Mapping[str, str] = field(default_factory=dict)
    instruction: str = ""
    labels: tuple[int, int] = (0, 0)

    def check(self, wanted: TaskName) -> None:
        """Raise BadRequestError for a request of another task."""
        if wanted != self.name:
            what = f"the model {_DOES[self.name]} (setting --task)"
            raise BadRequestError(what, code="unsupported_task")


def read_task(folder: Path, name: str, pooling: str, tokenizer: TextTokenizer) -> Task:
    """Read the task of a checkpoint. name, pooling: the settings, of which "auto" is what the files say. Raises
    CheckpointError for files that cannot be followed."""
    modules = _modules(folder)
    own: TaskName = "rerank" if "LogitScore" in modules else "embed" if "Pooling" in modules else "generate"
    config = read_json(folder, "config_sentence_transformers.json", required=False)
    prompts = {key: text for key, text in (config.get("prompts") or {}).items() if isinstance(text, str)}
    named: dict[str, Any] = {
        "prompts": prompts,
        "instruction": prompts.get(config.get("default_prompt_name") or "", ""),
    }
    settled = own if name == "auto" else name
    if pooling != "auto" and settled != "embed":
        raise CheckpointError(f"--pooling is {pooling}, which is for embeddings (setting --task embed)")
    match settled:
        case "embed":
            module = read_json(folder, f"{modules['Pooling']}/config.json") if "Pooling" in modules else None
            return Task(
                name="embed",
                pooling=_pooling(folder, module) if pooling == "auto" else pooling,  # type: ignore[arg-type]
                normalize=module is None or "Normalize" in modules,
                dimensions=tuple(read_json(folder, "config.json").get("matryoshka_dimensions") or ()),
                templated=module is not None,
                **(named if own == "embed" else {}),
            )
        case "rerank":
            given = read_json(folder, f"{modules['LogitScore']}/config.json") if "LogitScore" in modules else {}
            yes = given.get("true_token_id", tokenizer.id_of("yes"))
            no = given.get("false_token_id", tokenizer.id_of("no"))
            if not isinstance(yes, int) or not isinstance(no, int):
                raise CheckpointError(f"{folder} cannot score documents: it has no tokens for yes and no")
            return Task(name="rerank", labels=(yes, no), **(named if own == "rerank" else {}))
    return Task()


def load_template(folder: Path, given: str | None, task: Task) -> ChatTemplate:
    """Load the template of a task's prompts. given: Jinja, or a file of it, in place of the checkpoint's. Raises
    CheckpointError."""
    if task.name != "rerank":
        return load_chat_template(folder, given)
    path = folder / "additional_chat_templates" / "reranker.jinja"
    own = path.read_text(encoding="utf-8") if path.is_file() else _RERANKER
    return load_chat_template(folder, own if given is None else given, kind=PairTemplate)


def with_instruction(
    messages: Sequence[Mapping[str, Any]], task: Task, instruction: str | None = None
) -> list[Mapping[str, Any]]:
    """Return messages with the instruction as their system message: the request's, else the checkpoint's. A system
    message that is there already stays."""
    said = task.instruction if instruction is None else instruction
    if not said or not messages or messages[0].get("role") in ("system", "developer"):
        return list(messages)
    return [{"role": "system", "content": said}, *messages]


def _modules(folder: Path) -> dict[str, str]:
    """Return the folder of each module in modules.json, by the last part of its class's name."""
    path = folder / "modules.json"
    if not path.is_file():
        return {}
    found = {str(one["type"]).rpartition(".")[2]: str(one.get("path", "")) for one in _read_list(path)}
    unknown = found.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"}
    if unknown:
        raise CheckpointError(f"{path} has the module {min(unknown)}, which is not supported")
    return found


def _read_list(path: Path) -> list[Mapping[str, Any]]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(found, list) or not all(isinstance(one, dict) and "type" in one for one in found):
        raise CheckpointError(f"{path} must be a list of objects with a type")
    return found


def _pooling(folder: Path, module: Mapping[str, Any] | None) -> PoolingName:
    """Return the pooling of the module's config: a word in newer files, in older ones a switch for each kind."""
    if module is None:
        return "last"
    word = module.get("pooling_mode")
    words = [word] if word else [key.removeprefix(_OLD_PREFIX) for key, on in module.items() if _is_on(key, on)]
    if len(words) != 1 or words[0] not in _POOLINGS:
        raise CheckpointError(f"{folder}: pooling {' + '.join(map(str, words)) or 'of no kind'} is not supported")
    return _POOLINGS[words[0]]


def _is_on(key: str, value: Any) -> bool:
    return key.startswith(_OLD_PREFIX) and value is True
