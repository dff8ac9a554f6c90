"""What the body of a request asks of a server: texts, media, conversation, and things that only one server has.

The router has no tokenizer. A key stands for as many characters as a block has tokens on average.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import pydantic_core
from blake3 import blake3

from vlmserve.routing.replicas import ANSWER_TOKENS, BLOCK_TOKENS, KEY_BYTES, Demand

_TOKEN_BYTES = 4
_MEDIUM_TOKENS = 512
# Longer beginnings are not told apart.
_MOST_BLOCKS = 4096
_LIMITS = ("max_tokens", "max_completion_tokens", "max_output_tokens")
_TEXTS = ("text", "input_text", "output_text")
# Fields with conversations, with texts to embed, and with documents.
_PROMPTS = ("messages", "input", "texts", "inputs", "documents", "text_2")
# Fields beside a medium's address or data.
_BESIDE = ("type", "detail")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wish:
    """What a request asks for. model: the name in its body. at: the things that the answering server must have (an
    uploaded file, or an earlier response), as paths behind /v1/ that describe each."""

    demand: Demand
    model: str = ""
    at: tuple[str, ...] = ()


def wish_of(body: bytes | bytearray, owner: str, rid: str) -> Wish:
    """Return what a client's JSON body asks for. A body that is no JSON object asks for nothing, and a server will
    refuse it. rid: of the request."""
    try:
        asked = pydantic_core.from_json(body, cache_strings=False)
    except ValueError:
        return Wish(demand=Demand(rids=(rid,)))
    if not isinstance(asked, dict):
        return Wish(demand=Demand(rids=(rid,)))
    media: dict[bytes, int] = {}
    at: list[str] = []
    texts = _texts(asked, media, at)
    prefix, size = _keys(texts)
    limit = next((asked[name] for name in _LIMITS if isinstance(asked.get(name), int)), ANSWER_TOKENS)
    copies = asked.get("n")
    answers = copies if isinstance(copies, int) and 0 < copies < 1000 else 1
    for name, kind in (("input_file_id", "files"), ("previous_response_id", "responses")):
        if isinstance(asked.get(name), str):
            at.append(f"{kind}/{quote(asked[name], safe='')}")
    session = asked.get("session_id")
    return Wish(
        demand=Demand(
            rids=(rid,),
            tokens=size // _TOKEN_BYTES + sum(media.values()),
            answer=max(0, min(limit, ANSWER_TOKENS)) * answers,
            prefix=prefix,
            media=tuple(media.items()),
            session=f"{owner} {session}" if isinstance(session, str) else "",
        ),
        model=asked["model"] if isinstance(asked.get("model"), str) else "",
        at=tuple(dict.fromkeys(at)),
    )


def _keys(texts: Iterator[bytes]) -> tuple[tuple[bytes, ...], int]:
    """Return a key for each whole block of texts and all before it, and the bytes of all texts."""
    text = b"\0".join(texts)
    digest, keys, width = blake3(), [], BLOCK_TOKENS * _TOKEN_BYTES
    for begin in range(0, min(len(text), _MOST_BLOCKS * width) - width + 1, width):
        digest.update(text[begin : begin + width])
        keys.append(digest.digest(length=KEY_BYTES))
    return tuple(keys), len(text)


def _texts(asked: Mapping[str, Any], media: dict[bytes, int], at: list[str]) -> Iterator[bytes]:
    """Yield the texts of a prompt in the order in which templates have them, with digests in the places of media."""
    for name in ("cache_salt", "tools", "instructions", "prompt"):
        if asked.get(name):
            given = asked[name]
            yield (given if isinstance(given, str) else json.dumps(given)).encode(errors="replace")
    messages = next((asked[name] for name in _PROMPTS if asked.get(name)), None)
    for message in messages if isinstance(messages, list) else [{"content": messages}]:
        if isinstance(message, str):
            yield message.encode(errors="replace")
        if not isinstance(message, dict):
            continue
        yield str(message.get("role", "")).encode(errors="replace")
        content = message.get("content")
        for part in content if isinstance(content, list) else [content]:
            if isinstance(part, str):
                yield part.encode(errors="replace")
            elif isinstance(part, dict) and part.get("type") in _TEXTS:
                yield str(part.get("text")).encode(errors="replace")
            elif isinstance(part, dict):
                digest = blake3()
                for name, leaf in _leaves(part):
                    digest.update(leaf.encode(errors="replace"))
                    if name == "file_id":
                        at.append(f"files/{quote(leaf, safe='')}")
                key = digest.digest(length=KEY_BYTES)
                media[key] = _MEDIUM_TOKENS
                yield key
        if message.get("tool_calls"):
            yield json.dumps(message["tool_calls"]).encode()


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a part of a message, each with its field's name."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, dict):
        for field, inner in value.items():
            if field not in _BESIDE:
                yield from _leaves(inner, field)
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, name)
