"""What `import vlmserve` offers: names, former places, and the settings' keywords."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import re
import typing
from pathlib import Path

import pytest

import vlmserve
from vlmserve import LLM, AsyncLLM, ChatPrompt, EngineArgs, GenerateReqInput, SamplingParams, SettingsError, StageLimits
from vlmserve.commands.offline.inputs import EngineSettings, OtherNames
from vlmserve.config.aliases import ALIASES

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("vlmserve.client.boxes", "parse_boxes"),
        ("vlmserve.config.engine_args", "EngineArgs"),
        ("vlmserve.messages", "ReturnOptions GrammarSpec LogitsProcessorCall"),
        ("vlmserve.offline.async_llm", "AsyncLLM"),
        ("vlmserve.tokenizer.chat_messages", "ImageRef VideoRef"),
        ("vlmserve.tokenizer.input_embeds", "read_input_embeds"),
        ("vlmserve.tokenizer.request_builder", "TextPrompt TokensPrompt EmbedsPrompt ChatPrompt GenerateReqInput"),
        ("vlmserve.tokenizer.stage", "StageLimits"),
        ("vlmserve_common.errors", "VlmserveError BadRequestError EngineError CheckpointError"),
        ("processors.fetch.fetching", "FetchSettings"),
    ],
)
def test_former_places_still_import(module: str, names: str) -> None:
    imported = importlib.import_module(module)
    for name in names.split():
        assert getattr(imported, name) is getattr(vlmserve, name)
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(f"{module}.other")


def test_every_name_is_there_and_no_other() -> None:
    assert all(getattr(vlmserve, name) is not None for name in vlmserve.__all__)
    assert set(vlmserve.__all__) == {*vlmserve._PLACES, "__version__"}
    assert SamplingParams is vlmserve.SamplingOverrides
    with pytest.raises(AttributeError, match="no attribute 'SamplingParam'"):
        _ = vlmserve.SamplingParam


def test_the_documentation_imports_from_the_front_door() -> None:
    for page in ("llm.md", "knobs.md", "quick-start.md", "flags-of-others.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        assert re.findall(r"(?:from|import) (vlmserve\.[\w.]+|processors\.[\w.]+)", text) == []


def test_keywords_are_the_settings() -> None:
    declared, typed = typing.get_type_hints(EngineArgs), typing.get_type_hints(EngineSettings)
    others = typing.get_type_hints(OtherNames)
    fields = {field.name for field in dataclasses.fields(EngineArgs)} - {"model"}
    counts = {f"max_{media}_per_request" for media in ("images", "videos", "audios")}
    assert typed.keys() - others.keys() == fields | counts
    for name in fields:
        is_path = name.endswith(("_dir", "chat_template", "allowed_lora_path"))  # of any kind
        wider = str | None if is_path else typed[name]
        assert wider == declared[name], name
    known = fields | counts
    aliases = {name for name, alias in ALIASES.items() if alias.sets and known & set(alias.sets)}
    assert others.keys() == {name for name in aliases if name.isidentifier()}


def test_an_unknown_setting_is_named() -> None:
    for make in (LLM, AsyncLLM):
        with pytest.raises(SettingsError, match="no setting 'page_sise'; did you mean page_size"):
            make(page_sise=1)  # type: ignore[call-arg]


def test_settings_of_two_kinds_do_not_mix() -> None:
    with pytest.raises(TypeError, match="settings belong into the EngineArgs"):
        AsyncLLM(EngineArgs(model=""), StageLimits(), page_size=1)
    with pytest.raises(TypeError, match="StageLimits go with EngineArgs"):
        AsyncLLM("", StageLimits())


def test_async_llm_takes_the_keywords_of_llm() -> None:
    engine = AsyncLLM(num_threads=1, max_num_seqs=2, max_images_per_request=0)
    try:
        assert (engine.args.num_threads, engine.args.max_running_requests, engine.args.media_processes) == (1, 2, 0)

        async def ask() -> str:
            prompt = ChatPrompt(messages=[{"role": "user", "content": "Hello"}])
            request = GenerateReqInput(
                request_id="one", prompt=prompt, sampling=SamplingParams(temperature=0, max_tokens=2)
            )
            return "".join([choice.output.text async for choice in engine.generate(request)])

        assert asyncio.run(ask())
    finally:
        engine.close()
