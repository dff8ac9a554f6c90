"""Settings: one definition, four sources, clear complaints."""

from __future__ import annotations

import dataclasses
import re
import typing
from pathlib import Path

import pytest

from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.flags import CommandParser, add_settings
from vlmserve.config.settings import ServerSettings, iter_settings, load_settings

CONFIGS = Path(__file__).resolve().parents[2] / "configs"


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for setting in iter_settings():
        monkeypatch.delenv(f"VLMSERVE_{setting.name.upper()}", raising=False)
    monkeypatch.delenv("VLMSERVE_CONFIG", raising=False)


def _value(settings: ServerSettings, name: str) -> object:
    return getattr(settings, name) if hasattr(settings, name) else getattr(settings.engine, name)


def test_every_setting_can_come_from_each_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {setting.name for setting in iter_settings()} == (
        {field.name for field in dataclasses.fields(EngineArgs)}
        | {field.name for field in dataclasses.fields(ServerSettings)} - {"engine"}
    )
    for setting in iter_settings():
        other = _another_value(setting.type, setting.default, setting.name)
        text = str(other)
        for needed, value in _NEEDED.get(setting.name, {}).items():
            monkeypatch.setenv(f"VLMSERVE_{needed.upper()}", value)
        assert _value(load_settings({setting.name: text}), setting.name) == other
        monkeypatch.setenv(f"VLMSERVE_{setting.name.upper()}", text)
        assert _value(load_settings({}), setting.name) == other
        monkeypatch.delenv(f"VLMSERVE_{setting.name.upper()}")
        file = tmp_path / "settings.yaml"
        shown = f'"{text}"' if isinstance(other, str) else text.lower()
        file.write_text(f"{setting.name.replace('_', '-')}: {shown}\n")
        assert _value(load_settings({}, config=str(file)), setting.name) == other
        for needed in _NEEDED.get(setting.name, {}):
            monkeypatch.delenv(f"VLMSERVE_{needed.upper()}")


_NEEDED = {
    "ep_size": {"tp_size": "4096"},
    "enable_dp_attention": {"tp_size": "2", "dp_size": "2"},
    "enable_eplb": {"tp_size": "2", "ep_size": "2"},
    "ep_num_redundant_experts": {"tp_size": "2", "ep_size": "2", "enable_eplb": "true"},
    "nnodes": {"tp_size": "4096", "dist_init_addr": "host:1"},
    "speculative_algorithm": {"speculative_draft_model_path": "head"},
    "speculative_draft_model_path": {"speculative_algorithm": "eagle3"},
    "lora_paths": {"enable_lora": "true"},
    "merge_lora": {"lora_paths": "adapter"},
    "role": {"prefill_urls": "tcp://host:1"},
    "prefill_urls": {"role": "decode"},
    "hicache_storage_dir": {"enable_hierarchical_cache": "true"},
    "database_url": {"file_store_url": "s3://bucket"},
    "node_rank": {"tp_size": "8192", "nnodes": "8192", "dist_init_addr": "host:1"},
}
"""What a setting's other value does not go without."""


_OTHERS = {
    "page_size": 32,  # chunks are whole pages
    "device": "cpu",
    "prefill_urls": "tcp://other:8998,tcp://another:8998",
    "prefill_listen": "10.0.0.1:8998",
    "peer_key": "a secret of sixteen",
    "encoder_devices": "cpu",
    "lora_paths": "captions=/a,receipts=/b",
    "cuda_graph_bs": "1,2,4",
    "encoder_urls": "tcp://10.0.0.2:8997,tcp://[::1]:1",
    "encoder_listen": "[::]:0",
    "embedder_url": "http://127.0.0.1:8001/v1",
    "chat_template": "{{ messages[0].content }}",
    "metrics_prefixes": "vllm,sglang",
    "otlp_traces_endpoint": "http://127.0.0.1:4318/v1/traces",
    **dict.fromkeys(("allowed_local_media_path", "file_store_dir", "profile_dir"), str(CONFIGS)),
    "api_key_file": __file__,
    "database_url": "postgresql://me:word@host/database",
    "file_store_url": "s3://bucket/folder",
    "allowed_origins": "https://app.example.com",
}


def _another_value(type_: typing.Any, default: object, name: str) -> object:
    if name in _OTHERS:
        return _OTHERS[name]
    if type_ is bool:
        return not default
    if typing.get_origin(type_) is typing.Literal:
        return typing.get_args(type_)[-1]
    if int in (type_, *typing.get_args(type_)):
        return 4096 if default != 4096 else 8192
    if float in (type_, *typing.get_args(type_)):
        return 0.5
    return "something"


def test_a_flag_may_have_several_words() -> None:
    parser = CommandParser()
    add_settings(parser)
    given = vars(parser.parse_args(["--enable-lora", "--lora-paths", "a=/a", "b=/b", "--port", "1"]))
    settings = load_settings({name: value for name, value in given.items() if value is not None})
    assert settings.engine.adapters_at_start == (("a", "/a"), ("b", "/b"))


def test_flag_over_variable_over_file_over_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("page_size: 2\nport: 2\nmax-model-len: 2\n")
    monkeypatch.setenv("VLMSERVE_PAGE_SIZE", "4")
    monkeypatch.setenv("VLMSERVE_PORT", "4")
    settings = load_settings({"page_size": "8"}, config=str(file))
    assert (settings.engine.page_size, settings.port, settings.engine.max_model_len) == (8, 4, 2)
    assert settings.host == "127.0.0.1"


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("port: 1234")
    monkeypatch.setenv("VLMSERVE_CONFIG", str(file))
    assert load_settings({}).port == 1234


def test_empty_variables_and_files_say_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMSERVE_PORT", "")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert load_settings({}, config=str(tmp_path / "empty.yaml")) == ServerSettings(engine=EngineArgs(model=""))


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ({"page_size": "x"}, "--page-size is 'x'; it must be a whole number"),
        ({"dtype": "fp8"}, "--dtype is 'fp8'; it must be 'auto', 'float32', 'bfloat16' or 'float16'"),
        ({"chunked_prefill_size": "24"}, "is 24; it must be -1 (whole prompts), or a positive multiple of --page-size"),
        ({"max_total_tokens": "8"}, "--max-total-tokens is 8; it must be at least two pages (--page-size is 16)"),
        ({"mem_fraction_static": "nan"}, "--mem-fraction-static is nan; it must be above 0 and at most 1"),
        ({"enable_mixed_chunk": "perhaps"}, "--enable-mixed-chunk is 'perhaps'; it must be true or false"),
        ({"max_model_len": "0"}, "--max-model-len is 0; it must be 1 or more, or left out"),
        ({"port": "65536"}, "--port is 65536; it must be between 0 and 65535"),
        (
            {"allowed_media_domains": "a.example,,b"},
            "--allowed-media-domains is 'a.example,,b'; it must be host names such as example.com or",
        ),
        ({"startup_timeout_s": "3e6"}, "--startup-timeout-s is 3000000.0; it must be above 0 and at most 2000000"),
        ({"shutdown_timeout_s": "inf"}, "--shutdown-timeout-s is inf; it must be 0 or more, at most 2000000"),
        ({"max_body_mib": "inf"}, "--max-body-mib is inf; it must be above 0, and finite"),
        ({"allowed_local_media_path": "/no/such"}, "--allowed-local-media-path is '/no/such'; it must be an existing"),
        ({"file_store_dir": "/no/such"}, "--file-store-dir is '/no/such'; it must be an existing folder that can be"),
        ({"max_pixels": "all"}, "--max-pixels is 'all'; it must be auto, checkpoint, or a whole number of 1 or more"),
        ({"max_pixels": 1.5}, "--max-pixels is 1.5; it must be"),
        (
            {"hicache_storage_dir": "kv"},
            "--hicache-storage-dir is 'kv'; it must be left out without --enable-hierarchical-cache",
        ),
        (
            {"encoder_urls": "http://host:1"},
            "--encoder-urls is 'http://host:1'; it must be tcp://HOST:PORT, with commas",
        ),
        ({"encoder_urls": "tcp://host:1,tcp://host"}, "it must be tcp://HOST:PORT"),
        ({"encoder_listen": "host:65536"}, "--encoder-listen is 'host:65536'; it must be HOST:PORT, with a port of 0"),
        ({"role": "encode", "tp_size": 2}, "--role encode does not go with --tp-size above 1: --encoder-dp-size and"),
        ({"role": "encode", "encoder_urls": "tcp://host:1"}, "--encoder-urls does not go with --role encode"),
        ({"embedder_url": "10.0.0.2:8001"}, "--embedder-url is '10.0.0.2:8001'; it must be a URL such as http://"),
        ({"encoder_devices": "tpu"}, "--encoder-devices is 'tpu'; it must be cpu, cuda or cuda:N"),
        ({"encoder_devices": "cpu,cpu", "encoder_dp_size": 3}, "it must be one device, or 3 as --encoder-dp-size says"),
        (
            {"max_time_between_tokens_s": 0},
            "--max-time-between-tokens-s is 0.0; it must be above 0 and at most 2000000, or left out",
        ),
        ({"max_time_between_tokens_s": -1}, "--max-time-between-tokens-s is -1.0; it must be above 0"),
        (
            {"max_time_between_tokens_s": 5, "request_timeout_s": 3},
            "--max-time-between-tokens-s is 5.0; it must be at most --request-timeout-s, which is 3",
        ),
        ({"encoder_timeout_s": 0.0}, "--encoder-timeout-s is 0.0; it must be above 0 and at most 2000000, or left out"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(flags: dict[str, str], complaint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags)
    assert complaint in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_all_wrong_values_are_told_at_once_each_with_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-queued-requests: many\npage-sise: 4\nnonsense: 1\n")
    monkeypatch.setenv("VLMSERVE_NUM_THREADS", "few")
    with pytest.raises(SettingsError) as caught:
        load_settings({"port": "http"}, config=str(file))
    assert set(str(caught.value).splitlines()) == {
        "--port is 'http'; it must be a whole number",
        "VLMSERVE_NUM_THREADS is 'few'; it must be a whole number",
        f"{file}: max_queued_requests is 'many'; it must be a whole number",
        f"{file}: page_sise: no such setting; did you mean page_size?",
        f"{file}: nonsense: no such setting; `vlmserve serve --help-all` lists all",
    }


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("- a\n- b\n", "must hold 'setting: value' lines"),
        ("page-size: [1\n", "not YAML"),
        ("page-size: 1\npage_size: 2\n", "'page_size' is given twice"),
        ("1: 2\n", "must hold 'setting: value' lines"),
        (None, "cannot be read"),
    ],
)
def test_a_broken_file_is_told(tmp_path: Path, content: str | None, complaint: str) -> None:
    file = tmp_path / "settings.yaml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(SettingsError, match=complaint) as caught:
        load_settings({}, config=str(file))
    assert str(file) in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_the_presets_are_accepted() -> None:
    presets = sorted(CONFIGS.glob("*.yaml"))
    assert {path.name for path in presets} >= {"cpu.yaml", "h200.yaml"}
    for preset in presets:
        assert load_settings({}, config=str(preset)) != load_settings({})


@pytest.mark.parametrize(
    ("settings", "count"),
    [({}, 0), ({"encoder_dp_size": 3}, 3), ({"encoder_devices": "cuda:1,cuda:2"}, 2), ({"encoder_devices": "cpu"}, 1)],
)
def test_how_many_encoder_processes(settings: dict[str, object], count: int) -> None:
    assert EngineArgs(model="", **settings).num_encoders == count


def test_messages_name_settings_by_their_flags() -> None:
    """Wherever a text of the sources says "setting ..."."""
    root = Path(__file__).resolve().parents[2]
    flags = {f"--{setting.name.replace('_', '-')}" for setting in iter_settings()}
    found: dict[str, Path] = {}
    for folder in ("processors", "vision", "vlmserve"):
        for path in (root / folder).rglob("*.py"):
            # some texts go on in the next line
            named = re.findall(r"""setting[\s"f]+(--[a-z0-9-]+|[a-z]+_[a-z_]+)""", path.read_text())
            found |= dict.fromkeys(named, path)
    assert len(found) > 15
    assert {name: path for name, path in found.items() if name not in flags} == {}


@pytest.mark.parametrize(
    ("given", "meant"), [("auto", "auto"), ("checkpoint", "checkpoint"), ("1003520", 1003520), (1003520, 1003520)]
)
def test_the_largest_picture_is_a_word_or_a_number(given: object, meant: object) -> None:
    assert load_settings({"max_pixels": given}).engine.max_pixels == meant
    assert load_settings({}).engine.max_pixels == "auto"
