"""The processes that compile grammars with xgrammar, and say which tokens may come next.

A grammar comes from a stranger. Compiling it can take minutes or gigabytes, or crash the process, and so can each token
of an answer; its text does not tell. So each grammar has a process, which the kernel ends when it takes too much: that
ends the requests with this grammar, and no other request waits for them. The processes are forks of one that has
imported everything and has read the vocabulary. They end when the engine closes their pipe.
"""

from __future__ import annotations

import gc
import json
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from vlmserve.ipc.messages import THINK_END, GrammarSpec
from vlmserve.scheduler.grammar.matcher import FITS, MISFIT
from vlmserve_common.checkpoint.text_tokenizer import load_text_tokenizer
from vlmserve_common.process.child import die_with_parent
from vlmserve_common.process.limits import ProcessLimits, confine

COMPILED, REFUSED = b"C", b"R"
"""The first byte of the answer to a grammar: the bytes of memory follow, or a sentence."""

MAX_STEP_S = 0.2
"""CPU time that a step may take, for all answers with the grammar: all other requests wait for it."""
USUAL_STEP_S, USUAL_ROW_S = 0.02, 0.002
"""CPU time that steps may take in the long run: for a step, and for each answer in it. It is ten times the usual."""

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
    """Run the process that the others are forks of. The command line has a socket, through which the pipe of each new
    process comes, the parent's pid, and `GrammarSettings` as JSON."""
    control = socket.socket(fileno=int(sys.argv[1]))
    die_with_parent(int(sys.argv[2]), signal.SIGKILL)
    settings = json.loads(sys.argv[3])
    compiler, info, encode = make_compiler(settings["folder"], settings["vocab_size"], settings["stop_token_ids"])
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the forks
    gc.collect()
    gc.freeze()  # the forks share these pages
    control.send(b"r")
    own = os.getpid()
    while True:
        fds = socket.recv_fds(control, 1, 1)[1]
        if not fds:
            return
        if not os.fork():
            try:
                control.close()
                die_with_parent(own, signal.SIGKILL)
                _serve(Connection(fds[0]), compiler, info, encode, settings)
            finally:
                os._exit(0)
        os.close(fds[0])


def _serve(
    pipe: Connection, compiler: Any, info: Any, encode: Callable[[str], list[int]], settings: dict[str, Any]
) -> None:
    """Compile the grammar that comes through a pipe, and answer for it until the pipe is closed."""
    confine(ProcessLimits(memory_bytes=settings["memory_bytes"]))
    spec = GrammarSpec(**json.loads(pipe.recv_bytes()))
    # The engine waits for `timeout_s` at most; who is not waited for any more ends soon.
    signal.setitimer(signal.ITIMER_PROF, settings["timeout_s"] + 1)
    try:
        compiled = _without_warnings(compiler, spec)
        try_out(compiled)
    except (RuntimeError, ValueError, TypeError) as error:  # what xgrammar raises
        pipe.send_bytes(REFUSED + _plain(str(error)).encode("utf-8", "replace"))
        return
    signal.setitimer(signal.ITIMER_PROF, 0)
    pipe.send_bytes(COMPILED + str(_own_bytes()).encode())
    try:
        _fill_masks(pipe, compiled, encode, -(-info.vocab_size // 32))
    except (EOFError, OSError):
        return  # nobody has this grammar any more


def _fill_masks(pipe: Connection, compiled: Any, encode: Callable[[str], list[int]], words: int) -> None:
    """Answer for the steps of all answers with a grammar.

    A step's message: for each answer the number of its matcher, the tokens that came since, guesses of the next ones,
    and the most of these; the numbers of answers that have ended; and the part of `MAX_STEP_S` that the step gets. Its
    answer: int32 [*, 1 + words]. For each answer there is a row that begins with `FITS` or `MISFIT`, and a row that
    begins with the token for each guess that fits. Behind that is the mask of the token that comes next.
    """
    from xgrammar import GrammarMatcher

    matchers: dict[int, Any] = {}
    left_s = MAX_STEP_S
    while True:
        asked, ended, share = pipe.recv()
        for number in ended:
            matchers.pop(number, None)
        rows = []
        began = time.process_time()
        # The kernel ends the process then, wherever it is.
        signal.setitimer(signal.ITIMER_PROF, min(left_s, MAX_STEP_S * share))
        for number, tokens, guesses, most in asked:
            matcher = matchers.get(number) or matchers.setdefault(number, GrammarMatcher(compiled))
            if all(map(matcher.accept_token, tokens)):
                rows += _look_ahead(matcher, guesses, most, encode, words)
            else:
                rows.append(np.full(1 + words, -1, dtype=np.int32))
                rows[-1][0] = MISFIT
        signal.setitimer(signal.ITIMER_PROF, 0)
        left_s = min(MAX_STEP_S, left_s - (time.process_time() - began) + USUAL_STEP_S + USUAL_ROW_S * len(rows))
        pipe.send_bytes(np.stack(rows).tobytes() if rows else b"")


def _look_ahead(
    matcher: Any, guesses: Sequence[int], most: int, encode: Callable[[str], list[int]], words: int
) -> list[np.ndarray]:
    """Return the rows of an answer, see `_fill_masks`. Where one text goes on, its tokens are guessed instead."""
    if most and not matcher.is_terminated():
        guesses = encode(matcher.find_jump_forward_string()) or guesses
    rows = [np.empty(1 + words, dtype=np.int32)]
    rows[0][0] = FITS
    for guess in [*guesses[:most], None]:
        matcher.fill_next_token_bitmask(rows[-1][None, 1:], 0)
        if guess is None or not matcher.accept_token(guess):
            break
        if matcher.is_terminated():  # no token comes behind it; it is sampled in any case
            matcher.rollback(1)
            break
        rows.append(np.empty(1 + words, dtype=np.int32))
        rows[-1][0] = guess
    if len(rows) > 1:
        matcher.rollback(len(rows) - 1)
    return rows


def make_compiler(
    folder: str, vocab_size: int, stop_token_ids: list[int]
) -> tuple[Any, Any, Callable[[str], list[int]]]:
    """Make a compiler, the tokens that it compiles for, and the way from a text to tokens. folder: the checkpoint's.
    vocab_size: rows of logits.

    Special tokens have no text: an answer's text cannot contain them.
    """
    from xgrammar import GrammarCompiler, TokenizerInfo, VocabType

    tokenizer = load_text_tokenizer(Path(folder))
    special = tokenizer.special_ids
    vocab = [b"" if index in special else tokenizer.token_bytes(index) for index in range(vocab_size)]
    info = TokenizerInfo(vocab, VocabType.RAW, vocab_size=vocab_size, stop_token_ids=stop_token_ids)
    return GrammarCompiler(info, max_threads=1, cache_enabled=False), info, tokenizer.encode


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
    """Raise RuntimeError for a grammar that no text fits, or whose next tokens take long to find: most of these show at
    once. Walks along tokens that the grammar allows, always the same."""
    from xgrammar import GrammarMatcher

    vocab_size = compiled.tokenizer_info.vocab_size
    mask = np.empty((1, -(-vocab_size // 32)), dtype=np.int32)
    for seed in range(walks):
        dice, matcher = Random(seed), GrammarMatcher(compiled)
        for at in range(tokens):
            began = time.process_time()
            matcher.fill_next_token_bitmask(mask, 0)
            allowed = np.flatnonzero(np.unpackbits(mask[0].view(np.uint8), count=vocab_size, bitorder="little"))
            if not len(allowed):
                raise RuntimeError("no text fits it" if not at else "it comes to where nothing fits")
            matcher.accept_token(int(dice.choice(allowed)))
            if time.process_time() - began > MAX_STEP_S:
                raise RuntimeError(
                    "finding its next tokens takes too long: it repeats, or can be read, in too many ways"
                )
            if matcher.is_terminated():
                break


def _own_bytes() -> int:
    """Return the memory that only this process has."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


def _plain(message: str) -> str:
    text = _WHERE_IN_SOURCE.sub("", message).strip()
    text = re.sub(r"Check failed: .* is false: ", "", text)
    return text if len(text) <= 500 else f"{text[:500]}..."


if __name__ == "__main__":
    main()
