"""LoRA adapters of a server whose prompts are computed, and whose pictures are encoded, on other servers."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.tiny_adapters import with_adapter, write_adapter
from tests.tiny_checkpoints import make_checkpoint
from tests.vlmserve.reference import Reference, conversations
from tests.vlmserve.server_process import ServerProcess, await_that, serving
from tests.vlmserve.test_served_parity import as_openai

NEW = 6
LORA = ("--dtype", "float32", "--enable-lora")
ADAPTERS = {"decoder": r"(?!.*visual).*", "tower": r".*visual.*"}


@dataclass(frozen=True)
class Family:
    """A checkpoint, adapters for it, and answers to conversations by adapter; None is the model alone."""

    checkpoint: Path
    adapters: dict[str, Path]
    answers: dict[str | None, list[tuple[int, ...]]]

    def all_answered(self, server: ServerProcess, salt: str = "") -> None:
        """All at once, by all adapters."""
        asked = [(name, number) for number in range(len(self.answers[None])) for name in self.answers]
        with ThreadPoolExecutor(8) as pool:
            got = list(pool.map(lambda one: ask(server, *one, salt), asked))
        assert got == [tuple(self.answers[name][number]) for name, number in asked]


def ask(server: ServerProcess, name: str | None, number: int, salt: str = "") -> tuple[int, ...]:
    status, answer = server.post(
        "v1/chat/completions",
        model=name or "tiny",
        messages=as_openai(conversations()[number]),
        max_tokens=NEW,
        temperature=0,
        ignore_eos=True,
        return_token_ids=True,
        cache_salt=salt or "none",
    )
    assert status == 200, answer
    return tuple(answer["choices"][0]["token_ids"])


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    checkpoint = make_checkpoint("qwen3_vl", folder / "model")
    asked, adapters = conversations()[:3], {}
    answers: dict[str | None, list[tuple[int, ...]]] = {
        None: [Reference(checkpoint).answer(messages, NEW).token_ids for messages in asked]
    }
    for seed, (name, modules) in enumerate(ADAPTERS.items()):
        adapters[name] = write_adapter(checkpoint, folder / name, seed=seed, modules=modules)
        reference = Reference(with_adapter(checkpoint, adapters[name], folder / f"with_{name}"))
        answers[name] = [reference.answer(messages, NEW).token_ids for messages in asked]
    return Family(checkpoint, adapters, answers)


def urls(server: ServerProcess) -> str:
    return ",".join(json.loads(server.get("server_info")[1])["urls"])


def paths(family: Family, **others: Path) -> tuple[str, ...]:
    return ("--lora-paths", ",".join(f"{name}={folder}" for name, folder in {**family.adapters, **others}.items()))


@pytest.fixture(scope="module")
def prefill(family: Family, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Has one adapter at a time in memory, and no names for any."""
    words = ("--role", "prefill", "--prefill-listen", "127.0.0.1:0", "--max-loaded-loras", "1", "--tp-size", "2")
    with serving(tmp_path_factory.mktemp("prefill"), *LORA, *words, model=family.checkpoint) as server:
        yield server


def test_prompts_of_adapters_are_computed_elsewhere(family: Family, prefill: ServerProcess, tmp_path: Path) -> None:
    away = shutil.copytree(family.adapters["decoder"], tmp_path / "away")
    words = ("--role", "decode", "--prefill-urls", urls(prefill), *paths(family))
    with serving(tmp_path / "run", *LORA, *words, model=family.checkpoint) as decode:
        decode.await_log("takes orders")
        family.all_answered(decode)
        figures = decode.figures()
        assert figures["remote_prompts_total"] == 9
        assert figures["remote_prompts_failed_total"] == 0
        # an adapter that the prefill server cannot read costs nothing but its help
        status, answer = decode.post("v1/load_lora_adapter", lora_name="again", lora_path=str(away))
        assert status == 200, answer
        shutil.rmtree(away)
        assert ask(decode, "again", 1, "first") == tuple(family.answers["decoder"][1])
        family.all_answered(decode, "second")


@pytest.mark.slow
def test_an_adapter_that_is_not_there_is_left_to_the_decode_server(family: Family, tmp_path: Path) -> None:
    (tmp_path / "allowed").mkdir()
    words = ("--role", "prefill", "--prefill-listen", "127.0.0.1:0", "--allowed-lora-path", str(tmp_path / "allowed"))
    with serving(tmp_path / "prefill", *LORA, *words, model=family.checkpoint) as prefill:
        words = ("--role", "decode", "--prefill-urls", urls(prefill), *paths(family))
        with serving(tmp_path / "decode", *LORA, *words, model=family.checkpoint) as decode:
            decode.await_log("takes orders")
            family.all_answered(decode)
            figures = decode.figures()
            assert figures["remote_prompts_total"] == 3, "those of the model alone"
            assert figures["remote_prompts_failed_total"] == 6
            decode.await_log("is not below .* \\(setting --allowed-lora-path\\)")


@pytest.mark.parametrize("encoders", [(), pytest.param(("--encoder-dp-size", "1"), marks=pytest.mark.slow)], ids=str)
def test_pictures_of_adapters_are_encoded_elsewhere(family: Family, tmp_path: Path, encoders: tuple[str, ...]) -> None:
    words = ("--role", "encode", "--encoder-listen", "127.0.0.1:0", *encoders)
    with serving(tmp_path / "encoder", *LORA, *words, model=family.checkpoint) as encoder:
        words = ("--encoder-urls", urls(encoder), *paths(family))
        with serving(tmp_path / "server", *LORA, *words, model=family.checkpoint) as server:
            await_that(lambda: server.figures()["encoder_links"] == 1)
            family.all_answered(server)
            figures = server.figures()
            assert figures["encoder_link_fallbacks_total"] == 0
            assert figures["temporal_patches_encoded_total"] == encoder.figures()["temporal_patches_encoded_total"]


@pytest.mark.slow
def test_an_encoder_without_adapters_encodes_for_the_model_alone(family: Family, tmp_path: Path) -> None:
    words = ("--role", "encode", "--encoder-listen", "127.0.0.1:0")
    with serving(tmp_path / "encoder", "--dtype", "float32", *words, model=family.checkpoint) as encoder:
        words = ("--encoder-urls", urls(encoder), *paths(family))
        with serving(tmp_path / "server", *LORA, *words, model=family.checkpoint) as server:
            await_that(lambda: server.figures()["encoder_links"] == 1)
            family.all_answered(server)
            assert server.figures()["encoder_link_fallbacks_total"] > 0
            assert not any(re.search("Traceback|rror:", line) for line in encoder.log)
