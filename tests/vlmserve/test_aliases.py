"""Settings by the names of vLLM and SGLang, and words that nobody knows: from every source, taken or answered."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from docs.settings_pages import make_table
from vlmserve import cli
from vlmserve.config.aliases import ALIASES, ANY
from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.settings import ServerSettings, iter_settings, load_settings

PAGE = Path(__file__).resolve().parents[2] / "docs" / "flags-of-others.md"


def _refused(words: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert _status(words.split()) == 2
    return capsys.readouterr().err


def _status(words: list[str]) -> object:
    try:
        return cli.main(words)
    except SystemExit as ended:
        return ended.code


def test_what_means_the_same_is_taken(launched: list[ServerSettings]) -> None:
    vllm = (
        "serve m --gpu-memory-utilization 0.5 --max-num-seqs 7 --max-num-batched-tokens=4096 --block-size 32 --seed 3 "
        '--no-enable-prefix-caching --limit-mm-per-prompt {"image":4,"video":{"count":1}} --mm-processor-cache-gb 0.5 '
        '--mm-processor-kwargs {"max_pixels":50176,"fps":1,"device":"cuda"} --generation-config vllm '
        "--trust-remote-code -tp 1 --dtype half --log-level INFO --enforce-eager --tensor-parallel-size 1 "
        "--load-format auto --enable-chunked-prefill --disable-log-requests --runner pooling --task embedding"
    )
    sglang = (
        "serve --model-path m --mem-fraction-static 0.5 --max-running-requests 7 --chunked-prefill-size 4096 "
        "--page-size 32 --random-seed 3 --disable-radix-cache --tp 1 --enable-metrics --context-length 512 "
        "--disable-fast-image-processor --is-embedding"
    )
    assert cli.main(vllm.split()) == 0
    assert cli.main(sglang.split()) == 0
    for settings in launched:
        engine = settings.engine
        assert (engine.model, engine.mem_fraction_static, engine.max_running_requests) == ("m", 0.5, 7)
        assert (engine.chunked_prefill_size, engine.page_size, engine.random_seed) == (4096, 32, 3)
        assert engine.disable_radix_cache
        assert engine.task == "embed"
    assert launched[1].engine.max_model_len == 512
    assert launched[1].engine.resize_device == "cpu"
    first = launched[0]
    assert first.engine.disable_cuda_graph
    assert first.engine.disable_vit_cuda_graph
    assert (first.max_images_per_request, first.max_videos_per_request) == (4, 1)
    assert (first.engine.processor_cache_mib, first.engine.sampling_defaults) == (512, "openai")
    assert (first.engine.dtype, first.log_level) == ("float16", "info")
    assert (first.engine.max_pixels, first.engine.video_fps, first.engine.resize_device) == (50176, 1.0, "model")


@pytest.mark.parametrize("sizes", ["1,2,4", "[1, 2, 4]", "1 2 4"])
def test_sizes_of_captured_steps(sizes: str, launched: list[ServerSettings]) -> None:
    words = ["serve", "m", "--cudagraph-capture-sizes", sizes, "--max-cudagraph-capture-size", "3"]
    assert cli.main(words) == 0
    assert cli.main(["serve", "m", "--cuda-graph-bs", "1,2, 4", "--cuda-graph-max-bs", "3"]) == 0
    for settings in launched:
        assert settings.engine.cuda_graph_sizes == (1, 2, 4)
        assert settings.engine.cuda_graph_max_bs == 3
        assert not settings.engine.disable_cuda_graph


def test_switches_either_way(launched: list[ServerSettings]) -> None:
    for words in ("--enable-prefix-caching", "--no-enable-chunked-prefill", "--limit-mm-per-prompt image=2,audio=0"):
        assert cli.main(["serve", *words.split()]) == 0
    caching, whole, limited = launched
    assert not caching.engine.disable_radix_cache
    assert whole.engine.chunked_prefill_size == -1
    assert limited.max_images_per_request == 2


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--distributed-executor-backend ray", "is 'ray'; only mp, uni, none is supported"),
        ("-q fp8", "-q (here --quantization) is 'fp8'; it must be 'none', 'int8', 'int4' or 'w8a8'"),
        ("--enable-dp-lm-head", "--enable-dp-lm-head is not supported"),
        ("--attention-backend flashmla", "it must be 'auto', 'native', 'torch', 'triton' or 'flashinfer'"),
        ("--decode-attention-backend fa3", "--decode-attention-backend is not supported; use --attention-backend"),
        ("--limit-mm-per-prompt x", "--limit-mm-per-prompt is 'x': it must be a JSON object such as"),
        ("--limit-mm-per-prompt smell=2", "there is no 'smell' here"),
        ('--mm-processor-kwargs {"size":1}', "'size' belongs into a request's mm_processor_kwargs"),
        (
            "--gpu-memory-utilization 2",
            "--gpu-memory-utilization (here --mem-fraction-static) is 2.0; it must be above 0",
        ),
        ("--max-num-seqs many", "--max-num-seqs (here --max-running-requests) is 'many'; it must be a whole number"),
        ("--cudagraph-capture-sizes few", "(here --cuda-graph-bs) is 'few'; it must be whole numbers of 1 or more"),
        ("-m model.gguf", "-m is not supported; use --model"),
        ("model.gguf -c 4096", "-c is not supported; use --max-model-len"),
        ("-ngl", "-ngl is not supported; use --device"),
        ("-ngl 99", "-ngl is not supported; use --device"),
        ("--n-gpu-layers 99", "--n-gpu-layers is not supported; use --device"),
        (
            "--mmproj mmproj.gguf",
            "--mmproj is not supported; leave it out, for MODEL's folder has the vision tower, too",
        ),
        ("-t 8", "-t is not supported; use --num-threads"),
        ("-ctk q8_0", "-ctk is not supported; use --kv-cache-dtype"),
        ("--max-num-batched-tokens 24", "(here --chunked-prefill-size) is 24; it must be -1 (whole prompts), or a"),
    ],
)
def test_what_is_not_there_is_answered(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = _refused(f"serve {words}", capsys)
    assert answer in text
    assert "Traceback" not in text


def test_all_of_them_are_told_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    words = "serve -m model.gguf --mmproj mmproj.gguf -ngl 99 -c 4096 -n 10 --temp 0 --page-size 0"
    usage, *lines = _refused(words, capsys).splitlines()
    assert usage == "usage: vlmserve serve [MODEL] [options]"
    assert [line.partition(" is not supported; ")[0] for line in lines] == [
        f"vlmserve serve: error: {word}" for word in ("-m", "--mmproj", "-ngl", "-c", "-n", "--temp")
    ]


def test_no_guess_is_a_flag_that_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no --thread; did you mean --num-threads?" in _refused("serve --thread 2", capsys)


def test_attention_by_the_words_of_others() -> None:
    words = {"FLASHINFER": "flashinfer", "TRITON_ATTN": "triton", "TORCH_SDPA": "torch", "FLASH_ATTN": "auto"}
    for word, ours in words.items():
        assert load_settings({"model": "m", "attention_backend": word}).engine.attention_backend == ours


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("serve --page-siz 1", "there is no --page-siz; did you mean --page-size?"),
        ("serve --max-num-seq 1", "did you mean --max-num-seqs?"),
        ("bench processors --rounds x", "--rounds: 'x' must be a whole number of 1 or more"),
        ("", "name a command; vlmserve --help lists them"),
        ("bench", "name a benchmark: serve, peers, caption, cluster"),
        ("serve --xyzzy", "there is no --xyzzy\n"),
        ("serve m n", "[MODEL] [options]\nvlmserve serve: error: there is no place for 'n'"),
        ("cache ls d --nope", "usage: vlmserve cache ls [DIR] [options]\nvlmserve cache ls: error: there is no --nope"),
        ("warmup a.png --nope", "usage: vlmserve warmup [MODEL] INPUT... [options]\nvlmserve warmup: error: there is"),
        ("verify --nope", "usage: vlmserve verify [MODEL] [options]\nvlmserve verify: error: there is no --nope"),
        ("serv", "'serv' is none of serve, bench, "),
        ("bench srve", "did you mean serve?"),
        ("run qwen3-vl:2b", "there is no command 'run': vlmserve chat MODEL chats in the terminal"),
        ("pull qwen3-vl:2b", f"and {Path(sys.executable).with_name('hf')} download MODEL does so ahead of time"),
        ("bench vision --round 1", "did you mean --rounds?"),
        ("cache lst", "'lst' is none of ls, stats, verify, prune; did you mean ls?"),
    ],
)
def test_a_guess_at_what_was_meant(words: str, answer: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert answer in _refused(words, capsys)


def test_files_and_variables_take_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text("max-num-seqs: 5\nenable_prefix_caching: false\ntensor-parallel-size: 1\nseed: 1\n")
    monkeypatch.setenv("VLMSERVE_SEED", "2")
    monkeypatch.setenv("VLMSERVE_GPU_MEMORY_UTILIZATION", "0.25")
    monkeypatch.setenv("VLMSERVE_NO_ENABLE_CHUNKED_PREFILL", "yes")
    engine = load_settings({}, config=str(file)).engine
    assert engine.chunked_prefill_size == -1
    assert (engine.max_running_requests, engine.disable_radix_cache) == (5, True)
    assert (engine.random_seed, engine.mem_fraction_static) == (2, 0.25)  # a variable goes before the file
    monkeypatch.setenv("VLMSERVE_MEM_FRACTION_STATIC", "0.5")
    assert load_settings({"random_seed": 4}, config=str(file)).engine.random_seed == 4
    assert load_settings({}, config=str(file)).engine.mem_fraction_static == 0.5  # and our name before another


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("max-num-seqs: 5\nmax-running-requests: 6\n", "max_num_seqs and {file}: max_running_requests set the same"),
        ("cpu-offload-gb: 2\n", "{file}: cpu_offload_gb is 2; only 0 is supported"),
        ("enable-prefix-caching: perhaps\n", "{file}: enable_prefix_caching is 'perhaps'; it must be true or false"),
        ("max-num-seqs: many\n", "{file}: max_num_seqs is 'many'; it must be a whole number"),
    ],
)
def test_a_wrong_one_in_a_file(tmp_path: Path, content: str, complaint: str) -> None:
    file = tmp_path / "settings.yaml"
    file.write_text(content)
    with pytest.raises(SettingsError) as caught:
        load_settings({}, config=str(file))
    assert complaint.format(file=file) in str(caught.value)


def test_a_variable_of_no_effect_is_warned_of(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for name in ("PAGE_SIZ", "XYZZY", "CONFIG", "TEST_DEVICE", "SERVICE_HOST", "PORT_8000_TCP"):
        monkeypatch.setenv(f"VLMSERVE_{name}", "" if name == "CONFIG" else "1")
    load_settings({})
    assert [record.getMessage() for record in caplog.records] == [
        "the variable VLMSERVE_PAGE_SIZ is of no effect: there is no such setting; did you mean VLMSERVE_PAGE_SIZE?",
        "the variable VLMSERVE_XYZZY is of no effect: there is no such setting",
    ]


def test_the_port_that_kubernetes_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLMSERVE_PORT", "tcp://10.0.0.1:8000")
    with pytest.raises(SettingsError, match=r"VLMSERVE_PORT is 'tcp.*must be a whole number\nKubernetes sets that"):
        load_settings({})


def test_the_table_is_sound() -> None:
    ours = {setting.name for setting in iter_settings()}
    assert set(ALIASES) & ours == set()  # a name of our own means what it means here
    for alias in ALIASES.values():
        assert {*alias.sets, *alias.instead} <= ours
        assert not (alias.sets and (alias.taken or alias.instead))


@pytest.mark.parametrize("name", sorted(ALIASES))
def test_every_flag_of_the_table(name: str, launched: list[ServerSettings], capsys: pytest.CaptureFixture[str]) -> None:
    alias = ALIASES[name]
    word = flag(name) if len(name) > 1 else f"-{name}"
    if alias.switch:
        assert _status(["serve", flag(f"no_{name}")]) == 0
    for value in alias.taken if not alias.switch else ():
        assert _status(["serve", word, value]) == 0
    status = _status(["serve", word, *([] if alias.switch else ["no-such-value"])])
    text = capsys.readouterr().err
    assert "Traceback" not in text
    if status == 0:
        assert alias.sets in (("model",),) or alias.switch or ANY in alias.taken
    else:
        assert word in text


def test_the_documentation_has_the_table() -> None:
    assert make_table() in PAGE.read_text(encoding="utf-8")
