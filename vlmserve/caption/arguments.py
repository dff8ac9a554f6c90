"""What `vlmserve caption` can be told."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from vlmserve.caption.feed import Shard
from vlmserve.caption.inputs import Columns, InputFormat
from vlmserve.caption.outputs.choose import OutputSettings
from vlmserve.client.media_names import PICTURES, VIDEOS
from vlmserve.config.checks import SettingsError
from vlmserve.config.flags import GIVEN_AS, CommandParser, add_settings
from vlmserve.config.model_path import is_model
from vlmserve.config.settings import ServerSettings, iter_settings, load_settings
from vlmserve_common.compute.cpus import available_cpus

DEFAULT_PROMPT = "Describe the picture."
_INPUT_SUFFIXES = (*PICTURES, *VIDEOS, ".txt", ".jsonl", ".ndjson", ".parquet", ".pq", ".tar", ".tgz", ".gz")
_MOST_MEDIA_PROCESSES = 8
_PER_SERVER = 16

_ABOUT = """\
Caption pictures and videos: a few, or millions.

An INPUT is a picture or video, a folder (with all that is in it), a pattern in quotes, an http(s) or data: URL, a list
(.txt: a path or URL a line), a .jsonl file (a picture or video a line with fields beside it, a chat request, or a line
of OpenAI's batch form), a .parquet file, a WebDataset .tar, a folder or file of a remote store (s3://..., by fsspec),
or "-" (a list on standard input). Paths in a file are relative to its folder.

Captions go to files beside the pictures, or to --output, told by its name: captions.jsonl, captions.parquet,
part-%05d.parquet, part-%05d.tar (WebDataset, media included), or a folder/ of text files.

What is finished is on disk, and noted in a journal beside the output. A run that ended, however, goes on where it was
when the same command is given again; identical pictures are captioned once.
"""
_EPILOG = """\
examples:
  vlmserve caption pictures/                                      a .txt beside each picture
  vlmserve caption pictures/ --output captions.jsonl --errors errors.jsonl
  vlmserve caption Qwen/Qwen3-VL-2B-Instruct 'shards/*.tar' --output out-%05d.tar --prompt-file prompt.txt
  vlmserve caption data.parquet --output out.parquet --prompt 'Describe this {{ category }} in one sentence.'
  vlmserve caption requests.jsonl --output answers.jsonl --base-url http://a:8000/v1 --base-url http://b:8000/v1

The exit status is 0 when everything is captioned, 3 when some items failed (the others are captioned), 1 when the run
could not go on, 2 for a wrong command line, 130 if interrupted.
"""
_GROUPS = ("pictures", "videos", "vision encoder", "memory", "scheduling")
_OTHERS = {
    "model",
    "device",
    "dtype",
    "max_model_len",
    "num_threads",
    "attention_backend",
    "sampling_defaults",
    "log_level",
}
# Of no effect here, or said by a flag of this command.
_LEFT_OUT = {
    "allowed_local_media_path",
    "enable_mm_embeds",
    "max_pixels",
    "max_queued_media",
    "max_queued_requests",
    "video_fps",
}
_SAMPLING: tuple[tuple[str, type, str], ...] = (
    ("temperature", float, "default: 0, the likeliest caption; 0.7 with --num-captions above 1"),
    ("top_p", float, "sample from the likeliest tokens that have this much of the probability"),
    ("top_k", int, "sample from this many of the likeliest tokens"),
    ("min_p", float, "sample from tokens at least this likely, beside the likeliest"),
    ("repetition_penalty", float, "above 1: fewer repetitions"),
    ("presence_penalty", float, "above 0: fewer tokens that were there already"),
    ("frequency_penalty", float, "above 0: the same, by how often they were"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionCommand:
    """A command line, checked. options: fields of each request. knobs: of the parts that bring pictures, and videos.

    nothing_twice: as far as it says, each picture comes once, and prompts have nothing in common before it.
    """

    settings: ServerSettings
    nothing_twice: bool
    inputs: Sequence[str]
    input_format: InputFormat | None
    columns: Columns
    output: OutputSettings
    journal: Path | None
    errors: Path | None
    restart: bool
    retry_failed: bool
    shard: Shard
    limit: int | None
    prompt: str
    system: str | None
    prefix: str
    suffix: str
    options: dict[str, Any]
    picture_knobs: dict[str, Any]
    video_knobs: dict[str, Any]
    seed: int
    base_urls: Sequence[str]
    api_key: str | None
    served_model: str | None
    request_timeout_s: float
    server_timeout_s: float
    concurrency: int
    memory_bytes: int
    json: bool


def read_command(argv: Sequence[str]) -> CaptionCommand:
    """Raises SettingsError, one line for each problem."""
    args = vars(_parser().parse_intermixed_args(argv))
    own = {name: args.pop(name) for name in [name for name in args if name.startswith("own_")]}
    given = {name.removeprefix("own_"): value for name, value in own.items()}
    words: list[str] = given["words"]
    flags = {name: value for name, value in args.items() if name not in ("config", GIVEN_AS)}
    urls: list[str] = given["base_url"] or []
    is_input = Path(words[0]).suffix.lower() in _INPUT_SUFFIXES  # where a hub id such as a/b.png is not meant
    if not urls and "model" not in flags and not is_input and is_model(words[0], alone=len(words) == 1):
        flags["model"], words = words[0], words[1:]
        if not words:
            raise SettingsError(f"{flags['model']!r} is a model: name an INPUT, too")
    if given["api_key"] is not None:
        flags["api_key"] = given["api_key"]
    nothing_twice = _nothing_twice(given, words)
    defaults: dict[str, Any] = {"media_processes": min(_MOST_MEDIA_PROCESSES, available_cpus())}
    if nothing_twice:  # what is kept of them is of no use
        defaults |= {"processor_cache_mib": 0, "disable_radix_cache": True}
    settings = load_settings(flags, config=args["config"], defaults=defaults)
    problems = list(_problems(given, urls))
    if problems:
        raise SettingsError("\n".join(problems))
    concurrency = given["concurrency"]
    if concurrency is None:
        concurrency = _PER_SERVER * len(urls) if urls else settings.engine.max_running_requests
    return CaptionCommand(
        settings=settings,
        nothing_twice=nothing_twice,
        inputs=words,
        input_format=given["input_format"],
        columns=Columns(media=given["media_column"], prompt=given["prompt_column"], id=given["id_column"]),
        output=OutputSettings(
            output=given["output"],
            suffix=given["caption_suffix"],
            overwrite=given["overwrite"],
            items_per_file=given["items_per_file"],
        ),
        journal=given["journal"],
        errors=given["errors"],
        restart=given["restart"],
        retry_failed=given["retry_failed"],
        shard=_shard(given["shard"]),
        limit=given["limit"],
        prompt=_prompt(given["prompt"], given["prompt_file"]),
        system=given["system_prompt"],
        prefix=given["prefix"],
        suffix=given["suffix"],
        options=_options(given),
        picture_knobs=_named(given, "min_pixels", "max_pixels"),
        video_knobs=_named(given, "min_pixels", "max_pixels", "fps", "max_frames"),
        seed=given["seed"],
        base_urls=urls,
        api_key=settings.api_key,
        served_model=(settings.engine.model or None) if urls else None,
        request_timeout_s=given["request_timeout_s"],
        server_timeout_s=given["server_timeout_s"],
        concurrency=concurrency,
        memory_bytes=round(given["memory_gib"] * 2**30),
        json=given["json"],
    )


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="vlmserve caption", usage="%(prog)s [MODEL] INPUT... [options]", description=_ABOUT, epilog=_EPILOG
    )

    def add(group: argparse._ActionsContainer, name: str, **how: Any) -> None:
        group.add_argument(f"--{name.replace('_', '-')}", dest=f"own_{name}", **how)

    parser.add_argument(
        "own_words",
        metavar="[MODEL] INPUT...",
        nargs="+",
        help="MODEL: checkpoint folder, or a Hugging Face hub id; left out: the small built-in one. INPUT: see above",
    )
    files = parser.add_argument_group("inputs and outputs")
    add(files, "output", metavar="OUT", help="see above; default: files beside the pictures")
    add(files, "errors", type=Path, metavar="FILE", help="write what failed to FILE, a line of JSON each, with reasons")
    add(files, "input_format", choices=get_args(InputFormat), help="of all files, whatever their names say")
    add(files, "media_column", metavar="NAME", help="column or field with the picture or video; default: usual names")
    add(files, "prompt_column", metavar="NAME", help='column or field with an item\'s own prompt; .jsonl: "prompt"')
    add(files, "id_column", metavar="NAME", help='column or field with an item\'s name; .jsonl: "id"')
    add(
        files,
        "caption_suffix",
        default=".txt",
        metavar=".txt|.json|...",
        help="of caption files; .json has all that is known [default: .txt]",
    )
    add(files, "overwrite", action="store_true", help="replace caption files that are there already, of somebody else")
    add(
        files,
        "items_per_file",
        type=int,
        default=10_000,
        metavar="N",
        help="in a part of parquet or tars [default: 10000]",
    )
    add(files, "journal", type=Path, metavar="FILE", help="default: beside the output")
    add(files, "restart", action="store_true", help="delete what the last run wrote to this output, and begin anew")
    add(files, "retry_failed", action="store_true", help="try again what failed in runs before")
    add(files, "shard", default="0/1", metavar="I/N", help="caption the I-th of N equal parts only, counted from 0")
    add(files, "limit", type=int, metavar="N", help="stop after N items")
    asked = parser.add_argument_group("what is asked")
    add(asked, "prompt", metavar="TEXT", help=f"Jinja2 template with an item's fields [default: {DEFAULT_PROMPT}]")
    add(asked, "prompt_file", type=Path, metavar="FILE", help="read it from FILE; prompt.txt in a folder goes before")
    add(asked, "system_prompt", metavar="TEXT")
    add(asked, "prefix", default="", metavar="TEXT", help="put before each caption; a template, too")
    add(asked, "suffix", default="", metavar="TEXT", help="put behind each caption")
    add(asked, "num_captions", type=int, default=1, metavar="N", help="captions of each item [default: 1]")
    add(asked, "max_tokens", type=int, default=256, metavar="N", help="longest caption, in tokens [default: 256]")
    for name, kind, text in _SAMPLING:
        add(asked, name, type=kind, metavar="N" if kind is int else "X", help=text)
    add(asked, "stop", action="append", metavar="TEXT", help="end captions before this; may be given several times")
    add(asked, "seed", type=int, default=0, metavar="N", help="of sampling [default: 0]")
    add(asked, "min_pixels", type=int, metavar="N", help="smallest area that pictures and frames are resized to")
    add(asked, "max_pixels", type=int, metavar="N", help="largest area that pictures and frames are resized to")
    add(asked, "fps", type=float, metavar="X", help="frames a second taken of videos")
    add(asked, "max_frames", type=int, metavar="N", help="most frames taken of a video")
    who = parser.add_argument_group("who answers")
    add(
        who,
        "base_url",
        action="append",
        metavar="URL",
        help="a server's (http://host:port/v1), instead of this process; may be given several times",
    )
    add(who, "api_key", metavar="KEY", help="of these servers [env: VLMSERVE_API_KEY]")
    add(who, "request_timeout_s", type=float, default=600.0, metavar="X", help="seconds for an answer [default: 600]")
    add(
        who,
        "server_timeout_s",
        type=float,
        default=300.0,
        metavar="X",
        help="seconds without any server after which the run ends [default: 300]",
    )
    add(
        who,
        "concurrency",
        type=int,
        metavar="N",
        help=f"items in work at a time; default: --max-running-requests, or {_PER_SERVER} for each server",
    )
    add(who, "memory_gib", type=float, default=1.0, metavar="X", help="of files in work, in GiB [default: 1]")
    add(parser, "json", action="store_true", help="print the summary as JSON")
    names = {setting.name for setting in iter_settings() if setting.group in _GROUPS}
    add_settings(parser, (names | _OTHERS) - _LEFT_OUT)
    return parser


def _nothing_twice(given: dict[str, Any], words: Sequence[str]) -> bool:
    """See `CaptionCommand`."""
    requests = given["input_format"] == "jsonl" or any(".jsonl" in word or ".ndjson" in word for word in words)
    return not requests and given["num_captions"] == 1 and not given["prompt_column"] and not given["system_prompt"]


def _problems(given: dict[str, Any], urls: Sequence[str]) -> list[str]:
    problems = []

    def refuse(name: str, allowed: str) -> None:
        problems.append(f"--{name.replace('_', '-')} is {given[name]!r}; it must be {allowed}")

    for name in ("num_captions", "max_tokens", "items_per_file"):
        if given[name] < 1:
            refuse(name, "1 or more")
    for name in ("concurrency", "limit", "min_pixels", "max_pixels", "max_frames"):
        if given[name] is not None and given[name] < 1:
            refuse(name, "1 or more, or left out")
    for name in ("request_timeout_s", "server_timeout_s", "memory_gib"):
        if not 0 < given[name] < float("inf"):
            refuse(name, "above 0, and finite")
    if not given["caption_suffix"].startswith(".") or "/" in given["caption_suffix"]:
        refuse("caption_suffix", "a suffix such as .txt, .caption or .json")
    if given["prompt"] is not None and given["prompt_file"] is not None:
        problems.append("--prompt and --prompt-file: give one")
    if not 0 <= given["seed"] < 2**63:
        refuse("seed", "between 0 and 2**63 - 1")
    if given["api_key"] is not None and not urls:
        problems.append("--api-key goes with --base-url")
    bad_urls = [url for url in urls if not url.startswith(("http://", "https://"))]
    problems += [f"--base-url is {url!r}; it must be like http://host:port/v1" for url in bad_urls]
    return problems


def _shard(text: str) -> Shard:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return Shard(index=int(index), count=int(count))
    raise SettingsError(f"--shard is {text!r}; it must be like 0/4, 1/4, 2/4 or 3/4")


def _prompt(text: str | None, file: Path | None) -> str:
    if file is None:
        return DEFAULT_PROMPT if text is None else text
    try:
        return file.read_text(encoding="utf-8-sig").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"--prompt-file {file}: cannot be read: {error}") from None


def _options(given: dict[str, Any]) -> dict[str, Any]:
    count = given["num_captions"]
    temperature = given["temperature"]
    if temperature is None:
        temperature = 0.0 if count == 1 else 0.7
    if count > 1 and temperature == 0:
        raise SettingsError(f"--num-captions is {count}, but with --temperature 0 all of them would be the same")
    options = {"max_tokens": given["max_tokens"], "temperature": temperature}
    options |= {name: given[name] for name, _, _ in _SAMPLING if name != "temperature" and given[name] is not None}
    if count > 1:
        options["n"] = count
    if given["stop"]:
        options["stop"] = given["stop"]
    return options


def _named(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if given[name] is not None}
