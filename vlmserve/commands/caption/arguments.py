"""What `vlmserve caption` can be told."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

from vlmserve.commands.batch.inputs import Columns, InputFormat
from vlmserve.commands.caption.feed import Shard
from vlmserve.commands.caption.outputs.choose import OutputSettings
from vlmserve.commands.caption.run import RunSettings
from vlmserve.commands.client.media_names import PICTURES, VIDEOS
from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import AUTO, CHECKPOINT
from vlmserve.config.flags import GIVEN_AS, CommandParser, add_settings
from vlmserve.config.model_path import is_model
from vlmserve.config.settings import ServerSettings, iter_settings, load_settings
from vlmserve.frontend.grammar_checks import verify_grammar
from vlmserve.frontend.structured_output import make_spec
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import BadRequestError

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
_OTHERS = {"model", "device", "dtype", "max_model_len", "num_threads", "attention_backend"}
_OTHERS |= {"sampling_defaults", "log_level"}
# Of no effect here, or said by a flag of this command.
_LEFT_OUT = {"allowed_local_media_path", "enable_mm_embeds", "max_queued_media", "max_queued_requests"}
_LEFT_OUT |= {"max_pixels", "video_fps"}
_OWN = "own_"  # begins the names of this command's own flags: --max-pixels is a setting's, too
_KINDS: dict[str, type] = {"N": int, "X": float, "FILE": Path}
_SWITCH, _SEVERAL = {"action": "store_true"}, {"action": "append"}
_SAMPLING: dict[str, tuple[Any, ...]] = {
    "temperature": ("X", "default: 0, the likeliest caption; 0.7 with --num-captions above 1"),
    "top_p": ("X", "sample from the likeliest tokens that have this much of the probability"),
    "top_k": ("N", "sample from this many of the likeliest tokens"),
    "min_p": ("X", "sample from tokens at least this likely, beside the likeliest"),
    "repetition_penalty": ("X", "above 1: fewer repetitions"),
    "presence_penalty": ("X", "above 0: fewer tokens that were there already"),
    "frequency_penalty": ("X", "above 0: the same, by how often they were"),
}
# By groups: name -> what stands for its value, help, and what else argparse is to know.
_FLAGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "inputs and outputs": {
        "output": ("OUT", "see above; default: files beside the pictures"),
        "errors": ("FILE", "write what failed to FILE, a line of JSON each, with reasons"),
        "input_format": (None, "of all files, whatever their names say", {"choices": get_args(InputFormat)}),
        "media_column": ("NAME", "column or field with the picture or video; default: usual names"),
        "prompt_column": ("NAME", 'column or field with an item\'s own prompt; .jsonl: "prompt"'),
        "id_column": ("NAME", 'column or field with an item\'s name; .jsonl: "id"'),
        "caption_suffix": (".txt|.json|...", "of caption files; .json has all that is known", {"default": ".txt"}),
        "overwrite": (None, "replace caption files that are there already, of somebody else", _SWITCH),
        "items_per_file": ("N", "in a part of parquet or tars", {"default": 10_000}),
        "journal": ("FILE", "default: beside the output"),
        "restart": (None, "delete what the last run wrote to this output, and begin anew", _SWITCH),
        "retry_failed": (None, "try again what failed in runs before", _SWITCH),
        "shard": ("I/N", "caption the I-th of N equal parts only, counted from 0", {"default": "0/1"}),
        "limit": ("N", "stop after N items"),
    },
    "what is asked": {
        "prompt": ("TEXT", f"Jinja2 template with an item's fields; default: {DEFAULT_PROMPT}"),
        "prompt_file": ("FILE", "read it from FILE; prompt.txt in a folder goes before"),
        "system_prompt": ("TEXT", "of each request"),
        "prefix": ("TEXT", "put before each caption; a template, too", {"default": ""}),
        "suffix": ("TEXT", "put behind each caption", {"default": ""}),
        "num_captions": ("N", "captions of each item", {"default": 1}),
        "max_tokens": ("N", "longest caption, in tokens", {"default": 256}),
        **_SAMPLING,
        "stop": ("TEXT", "end captions before this; may be given several times", _SEVERAL),
        "seed": ("N", "of sampling", {"default": 0}),
        "json_schema": ("FILE", "make each caption JSON of the JSON schema in FILE"),
        "min_pixels": ("N", "smallest area that pictures and frames are resized to"),
        "max_pixels": ("N", "largest area that pictures and frames are resized to"),
        "fps": ("X", "frames a second taken of videos"),
        "max_frames": ("N", "most frames taken of a video"),
    },
    "who answers": {
        "base_url": ("URL", "a server, http://host:port/v1, instead of this process; may be given again", _SEVERAL),
        "api_key": ("KEY", "of these servers [env: VLMSERVE_API_KEY]"),
        "request_timeout_s": ("X", "seconds for an answer", {"default": 600.0}),
        "server_timeout_s": ("X", "seconds without any server after which the run ends", {"default": 300.0}),
        "concurrency": ("N", f"items in work; default: --max-running-requests, or {_PER_SERVER} for each server"),
        "memory_gib": ("X", "of files in work, in GiB", {"default": 1.0}),
    },
    "": {"json": (None, "print the summary as JSON", _SWITCH)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionCommand:
    """A command line, checked. prompt, prefix, suffix, system: see `Prompts`.

    nothing_twice: as far as it says, each picture comes once, and prompts have nothing in common before it.
    """

    settings: ServerSettings
    run: RunSettings
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
    base_urls: Sequence[str]
    request_timeout_s: float
    server_timeout_s: float
    json: bool


def read_command(argv: Sequence[str]) -> CaptionCommand:
    """Raises SettingsError, one line for each problem."""
    args = vars(_parser().parse_intermixed_args(argv))
    given = {name.removeprefix(_OWN): value for name, value in args.items() if name.startswith(_OWN)}
    flags = {name: args[name] for name in args if not name.startswith(_OWN) and name not in ("config", GIVEN_AS)}
    words: list[str] = given["words"]
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
    if given["max_pixels"] is not None and settings.engine.max_pixels == AUTO:  # asked for: nobody else need choose
        settings = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, max_pixels=CHECKPOINT))
    problems = list(_problems(given, urls))
    if problems:
        raise SettingsError("\n".join(problems))
    as_given = {field.name: given[field.name] for field in dataclasses.fields(CaptionCommand) if field.name in given}
    more: dict[str, Any] = {
        "inputs": words,
        "columns": Columns(media=given["media_column"], prompt=given["prompt_column"], id=given["id_column"]),
        "output": OutputSettings(
            output=given["output"],
            suffix=given["caption_suffix"],
            overwrite=given["overwrite"],
            items_per_file=given["items_per_file"],
        ),
        "shard": _shard(given["shard"]),
        "prompt": _prompt(given["prompt"], given["prompt_file"]),
        "system": given["system_prompt"],
    }
    most = _PER_SERVER * len(urls) if urls else settings.engine.max_running_requests
    run = RunSettings(
        concurrency=given["concurrency"] or most,
        bytes_in_memory=round(given["memory_gib"] * 2**30),
        options=_options(given),
        picture_knobs=_named(given, "min_pixels", "max_pixels"),
        video_knobs=_named(given, "min_pixels", "max_pixels", "fps", "max_frames"),
        seed=given["seed"],
    )
    return CaptionCommand(settings=settings, run=run, nothing_twice=nothing_twice, base_urls=urls, **(as_given | more))


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="vlmserve caption", usage="%(prog)s [MODEL] INPUT... [options]", description=_ABOUT, epilog=_EPILOG
    )
    parser.add_argument(
        f"{_OWN}words",
        metavar="[MODEL] INPUT...",
        nargs="+",
        help="MODEL: checkpoint folder, or a Hugging Face hub id; left out: the small built-in one. INPUT: see above",
    )
    for title, group in _FLAGS.items():
        place = parser.add_argument_group(title) if title else parser
        for name, (metavar, text, *how) in group.items():
            more: dict[str, Any] = {"metavar": metavar, "type": _KINDS.get(metavar, str)} if metavar else {}
            more |= how[0] if how else {}
            if "default" in more and more["default"] not in ("", None):
                text += f" [default: {more['default']:g}]" if metavar in _KINDS else f" [default: {more['default']}]"
            place.add_argument(f"--{name.replace('_', '-')}", dest=_OWN + name, help=text, **more)
    names = {setting.name for setting in iter_settings() if setting.group in _GROUPS}
    add_settings(parser, (names | _OTHERS) - _LEFT_OUT)
    return parser


def _nothing_twice(given: dict[str, Any], words: Sequence[str]) -> bool:
    """See `CaptionCommand`."""
    requests = given["input_format"] == "jsonl" or any(".jsonl" in word or ".ndjson" in word for word in words)
    return not requests and given["num_captions"] == 1 and not given["prompt_column"] and not given["system_prompt"]


def _problems(given: dict[str, Any], urls: Sequence[str]) -> Iterator[str]:
    def refuse(name: str, allowed: str) -> str:
        return f"--{name.replace('_', '-')} is {given[name]!r}; it must be {allowed}"

    for name in ("num_captions", "max_tokens", "items_per_file"):
        if given[name] < 1:
            yield refuse(name, "1 or more")
    for name in ("concurrency", "limit", "min_pixels", "max_pixels", "max_frames"):
        if given[name] is not None and given[name] < 1:
            yield refuse(name, "1 or more, or left out")
    for name in ("request_timeout_s", "server_timeout_s", "memory_gib"):
        if not 0 < given[name] < float("inf"):
            yield refuse(name, "above 0, and finite")
    if not given["caption_suffix"].startswith(".") or "/" in given["caption_suffix"]:
        yield refuse("caption_suffix", "a suffix such as .txt, .caption or .json")
    if given["prompt"] is not None and given["prompt_file"] is not None:
        yield "--prompt and --prompt-file: give one"
    if not 0 <= given["seed"] < 2**63:
        yield refuse("seed", "between 0 and 2**63 - 1")
    if given["api_key"] is not None and not urls:
        yield "--api-key goes with --base-url"
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"--base-url is {url!r}; it must be like http://host:port/v1"


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
    if count > 1 and given["temperature"] == 0:
        raise SettingsError(f"--num-captions is {count}, but with --temperature 0 all of them would be the same")
    options = {"max_tokens": given["max_tokens"], "temperature": 0.0 if count == 1 else 0.7}
    options |= _named(given, *_SAMPLING)
    if count > 1:
        options["n"] = count
    if given["json_schema"] is not None:
        options["response_format"] = _json_format(given["json_schema"])
    return options | _named(given, "stop")


def _json_format(file: Path) -> dict[str, Any]:
    """The request's response_format for the JSON schema in a file."""
    try:
        schema = json.loads(file.read_text(encoding="utf-8-sig"))
        verify_grammar(make_spec("json_schema", schema, param=f"--json-schema {file}"))
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"--json-schema {file}: cannot be read: {error}") from None
    except BadRequestError as error:
        raise SettingsError(error.message) from None
    return {"type": "json_schema", "json_schema": {"name": "caption", "schema": schema}}


def _named(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if given[name] is not None}
