"""Vectors by servers with POST /v1/embeddings: this one's, vLLM's, or another that takes `messages`."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np

from vlmserve.commands.batch.item import ChatRequest
from vlmserve.commands.caption.outputs.vectors import as_text
from vlmserve.commands.caption.remote import RemoteCaptioner
from vlmserve.commands.caption.servers import NoAnswer
from vlmserve.commands.client.media import with_data_urls

_TAKEN = ("dimensions", "mm_processor_kwargs")


class RemoteEmbedder(RemoteCaptioner):
    """A `Captioner` whose servers answer with vectors."""

    path = "embeddings"

    def body(self, request: ChatRequest) -> bytes:
        """See `RemoteCaptioner`. The instruction is a system message, which every server takes."""
        said = request.options.get("instruction")
        system = [] if said is None else [{"role": "system", "content": said}]
        options = {name: request.options[name] for name in _TAKEN if name in request.options}
        messages = with_data_urls([*system, *request.messages])
        whole = {"add_generation_prompt": True, "add_special_tokens": True, "encoding_format": "base64"}
        return json.dumps({"model": self.model, "messages": messages, **whole, **options}).encode()

    def read(self, body: Any, content: bytes, wanted: int) -> dict[str, Any] | NoAnswer:
        """See `RemoteCaptioner`."""
        try:
            given, tokens = body["data"][0]["embedding"], body["usage"]["prompt_tokens"]
            row = np.frombuffer(base64.b64decode(given), "<f4") if isinstance(given, str) else np.array(given, "<f4")
        except (TypeError, KeyError, IndexError, ValueError):
            return NoAnswer(reason=f"an answer that is no embedding: {content[:200].decode(errors='replace')}")
        return {"embedding": as_text(row), "model": body.get("model"), "usage": {"prompt_tokens": tokens}}
