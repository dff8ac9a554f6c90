"""The process that compiles grammars with xgrammar: see `CompileProcess`.

A grammar comes from a stranger. Compiling it can take minutes or gigabytes, or crash the process, and its text does not
tell. So the kernel limits its time and memory, as with media.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from vlmserve.ipc.messages import THINK_END, GrammarSpec
from vlmserve.scheduler.grammar.matcher import Matcher, masks_of
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.process.child import die_with_parent
from vlmserve_common.process.limits import ProcessLimits, confine

COMPILED, REFUSED = b"C", b"R"
"""The first byte of an answer: a compiled grammar in JSON follows, or a sentence."""

MAX_TRIED_STEP_S = 0.25
"""CPU time that a token may take when a grammar is tried out."""

_THOUGHTS = {
    "type": "structural_tag",
    "format": {
        "type": "sequence",
        "elements": [
            {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": THINK_END},
            {"type": "const_string", "value": "\n\n"},
        ],
    },
}

_WHERE_IN_SOURCE = re.compile(r"^\[[\d:]+\] \S+: ", re.MULTILINE)
# A request may say oneOf for anyOf, as pydantic does for unions: an answer fits one of them at least.
_HARMLESS = re.compile(r"oneOf .*anyOf semantics")


def main() -> None:
    """Run the process. The command line has its end of the pipe, the parent's pid, and `CompilerSettings` as JSON."""
    pipe = Connection(int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    settings = json.loads(sys.argv[3])
    compiler, tokenizer_info = make_compiler(settings["folder"], settings["vocab_size"], settings["stop_token_ids"])
    pipe.send_bytes(tokenizer_info.serialize_json().encode())
    confine(ProcessLimits(memory_bytes=settings["memory_bytes"]))
    while True:
        try:
            spec = GrammarSpec(**json.loads(pipe.recv_bytes()))
        except EOFError:
            return
        try:
            compiled = _without_warnings(compiler, spec)
            try_out(compiled)
            pipe.send_bytes(COMPILED + compiled.serialize_json().encode())
        except (RuntimeError, ValueError, TypeError) as error:  # what xgrammar raises
            pipe.send_bytes(REFUSED + _plain(str(error)).encode("utf-8", "replace"))


def make_compiler(folder: str, vocab_size: int, stop_token_ids: list[int]) -> tuple[Any, Any]:
    """Make a compiler and the tokens that it compiles for. folder: the checkpoint's. vocab_size: rows of logits.

    Special tokens have no text: an answer's text cannot contain them.
    """
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    tokenizer = load_text_tokenizer(Path(folder))
    special = tokenizer.special_ids
    vocab = [b"" if index in special else tokenizer.token_bytes(index) for index in range(vocab_size)]
    info = TokenizerInfo(vocab, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    return GrammarCompiler(info, max_threads=1, cache_enabled=False), info


def compile_grammar(compiler: Any, spec: GrammarSpec) -> Any:
    """Compile a grammar. Raises RuntimeError for a malformed one."""
    from xgrammar import Grammar

    grammar = _form(spec)
    if spec.calls:
        grammar = Grammar.union(grammar, _of_tag(spec.calls))
    if spec.thinking:
        grammar = Grammar.concat(Grammar.from_structural_tag(_THOUGHTS), grammar)
    return compiler.compile_grammar(grammar)


def _form(spec: GrammarSpec) -> Any:
    from xgrammar import Grammar

    match spec.kind:
        case "json_schema":
            return _on_one_line(spec.text, strict=spec.strict)
        case "regex":
            return Grammar.from_regex(spec.text)
        case "ebnf":
            return Grammar.from_ebnf(spec.text)
        case "choice":
            texts = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in json.loads(spec.text))
            return Grammar.from_ebnf(f"root ::= {texts}")
        case "structural_tag":
            return _of_tag(spec.text)


def _on_one_line(schema: str, *, strict: bool = True) -> Any:
    """Return the grammar of JSON on one line: where whitespace is free, a small model may write nothing else."""
    from xgrammar import Grammar

    return Grammar.from_json_schema(schema, any_whitespace=False, strict_mode=strict)


def _of_tag(text: str) -> Any:
    """Return the grammar of a structural tag. xgrammar's tags leave whitespace free, so parts with any_whitespace false
    become grammars first."""
    from xgrammar import Grammar

    def with_grammars(part: Any) -> Any:
        if isinstance(part, list):
            return [with_grammars(one) for one in part]
        if not isinstance(part, dict):
            return part
        if part.get("any_whitespace") is False and part.get("style") == "json":
            return {"type": "grammar", "grammar": str(_on_one_line(json.dumps(part["json_schema"])))}
        return {key: with_grammars(value) for key, value in part.items()}

    return Grammar.from_structural_tag(json.dumps(with_grammars(json.loads(text))))


def _without_warnings(compiler: Any, spec: GrammarSpec) -> Any:
    """Compile a grammar, and fail if xgrammar warns on stderr that it leaves something out. Tools that are not strict
    may lose something."""
    kept, file = os.dup(2), os.memfd_create("warnings")
    os.dup2(file, 2)
    try:
        compiled = compile_grammar(compiler, spec)
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        said = os.pread(file, 1 << 16, 0).decode("utf-8", "replace")
        os.close(file)
    warnings = [line for line in said.splitlines() if "Warning: " in line and not _HARMLESS.search(line)]
    if warnings and (spec.strict or spec.kind != "structural_tag"):
        raise RuntimeError(warnings[0].partition("Warning: ")[2])
    return compiled


def try_out(compiled: Any, *, walks: int = 2, tokens: int = 32) -> None:
    """Raise RuntimeError for a grammar that no text fits, or whose next tokens take long to find: here the process can
    be ended, in the engine it could not. Walks along tokens that the grammar allows, always the same."""
    for seed in range(walks):
        dice, matcher = Random(seed), Matcher(compiled)
        for at in range(tokens):
            began = time.thread_time()
            allowed = np.flatnonzero(np.unpackbits(masks_of([matcher])[0].view(np.uint8), bitorder="little"))
            allowed = allowed[allowed < compiled.tokenizer_info.vocab_size]
            if not len(allowed):
                raise RuntimeError("no text fits it" if not at else "it comes to where nothing fits")
            matcher.accept(int(dice.choice(allowed)))
            if time.thread_time() - began > MAX_TRIED_STEP_S:
                raise RuntimeError(
                    "finding its next tokens takes too long: it repeats, or can be read, in too many ways"
                )
            if matcher.is_over:
                break


def _plain(message: str) -> str:
    text = _WHERE_IN_SOURCE.sub("", message).strip()
    text = re.sub(r"Check failed: .* is false: ", "", text)
    return text if len(text) <= 500 else f"{text[:500]}..."


if __name__ == "__main__":
    main()
