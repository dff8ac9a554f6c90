"""The checkpoint's tokenizer: text to ids, and every id's exact bytes.

Built on the `tokenizers` library alone, so that the detokenizer process stays light; `transformers` is imported only
for a checkpoint that has no tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders

from vlmserve_common.checkpoint.fields import read_json
from vlmserve_common.errors import CheckpointError

_SHORT_CHARS = 4096  # which take about a millisecond


class TextTokenizer:
    """A byte-level BPE tokenizer (every Qwen-VL family's): immutable and safe to share between threads.

    Raises CheckpointError for a tokenizer of another kind, since only a byte-level one has a byte string per id.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, decoders.ByteLevel):
            kind = type(tokenizer.decoder).__name__
            raise CheckpointError(f"only byte-level BPE tokenizers can be served, this one decodes by {kind}")
        self._tokenizer = tokenizer
        self._byte_of_char = byte_level_alphabet()
        added = tokenizer.get_added_tokens_decoder()
        self._added_ids = frozenset(added)
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self.num_ids = 1 + max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self._bytes: list[bytes | None] = [None] * self.num_ids

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Token ids of a rendered prompt; special tokens' text becomes their ids. add_special_tokens: add those that
        tokenizer.json puts around a text, if any."""
        # The library's call for one text holds the interpreter to its end. The one for several texts does not. To give
        # it up and wait for it again costs more than a short text's tokens.
        if len(text) <= _SHORT_CHARS:
            return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids

    def continue_text(self, ids: Sequence[int], text: str) -> list[int]:
        """Ids of the text that `ids` stand for, followed by `text`: its end may join the beginning of `text`.

        ids: as `encode` gave them. Added tokens split a text, so what lies before the last of them stays.
        """
        tail = next((place for place in range(len(ids), 0, -1) if ids[place - 1] in self._added_ids), 0)
        return [*ids[:tail], *self.encode(self.decode(ids[tail:]) + text)]

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """The whole text of some ids, invalid UTF-8 as U+FFFD; see DetokenizerManager for the incremental form."""
        skipped: frozenset[int] = self.special_ids if skip_special_tokens else frozenset()
        return b"".join(self.token_bytes(i) for i in ids if i not in skipped).decode("utf-8", "replace")

    def id_of(self, token: str) -> int | None:
        """The id of a token given by its exact text, e.g. "<|im_end|>", or None."""
        return self._tokenizer.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; empty for the ids between the tokenizer's size and the model's padded one."""
        if not 0 <= token_id < self.num_ids:
            return b""
        known = self._bytes[token_id]
        if known is None:
            known = self._bytes[token_id] = self._look_up(token_id)
        return known

    def _look_up(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        # Added tokens go through the same table as the vocabulary's, and as plain UTF-8 where a character is not in it:
        # so does the tokenizer's own decoder.
        try:
            return bytes(self._byte_of_char[char] for char in token)
        except KeyError:
            return token.encode("utf-8")


def byte_level_alphabet() -> dict[str, int]:
    """The printable stand-in of each byte, as GPT-2's encoder defines it (`bytes_to_unicode`): character -> byte.

    Bytes that print in Latin-1 stand for themselves; all remaining bytes take the code points from 256 on, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(rest)}


def load_text_tokenizer(folder: Path) -> TextTokenizer:
    """Load the tokenizer of a checkpoint folder. CheckpointError names the folder and the problem."""
    path = folder / "tokenizer.json"
    try:
        if path.is_file():
            tokenizer = Tokenizer.from_file(str(path))
            _add_configured_tokens(tokenizer, folder)
        else:
            tokenizer = _from_vocabulary(folder)
    except CheckpointError:
        raise
    except Exception as error:  # tokenizers raises plain Exception
        raise CheckpointError(f"{folder}: cannot load the tokenizer: {error}") from error
    # A tokenizer.json may have been saved with a training run's limits.
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return TextTokenizer(tokenizer)


def _add_configured_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Add what only tokenizer_config.json knows, at the ids it says."""
    known = tokenizer.get_added_tokens_decoder()
    listed = read_json(folder, "tokenizer_config.json", required=False).get("added_tokens_decoder", {})
    for index, entry in sorted(((int(i), f) for i, f in listed.items()), key=lambda pair: pair[0]):
        content = entry["content"]
        if index in known and known[index].content == content and known[index].special == entry["special"]:
            continue
        token = AddedToken(**{key: value for key, value in entry.items() if key != "special"})
        (tokenizer.add_special_tokens if entry.get("special") else tokenizer.add_tokens)([token])
        if (there := tokenizer.token_to_id(content)) != index:
            raise CheckpointError(
                f"{folder}: tokenizer_config.json puts {content!r} at {index}, tokenizer.json at {there}"
            )


def _from_vocabulary(folder: Path) -> Tokenizer:
    if not ((folder / "vocab.json").is_file() and (folder / "merges.txt").is_file()):
        raise CheckpointError(f"{folder} has neither tokenizer.json nor vocab.json and merges.txt")
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder).backend_tokenizer
