"""The command line of `vlmserve caption`."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import io
import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from vlmserve.commands.batch.command_line import INTERRUPTED, add_media_settings, input_parser, run_checked, take_model
from vlmserve.commands.batch.inputs import Columns, InputFormat
from vlmserve.commands.caption.feed import ItemShard
from vlmserve.commands.caption.opening import CaptionSettings
from vlmserve.commands.caption.prompts import DEFAULT_PROMPT
from vlmserve.commands.client.conversation import OPTIONS
from vlmserve.commands.client.media import PICTURES, VIDEOS, scheme_of
from vlmserve.config.checks import SettingsError
from vlmserve.config.engine_args import AUTO, CHECKPOINT
from vlmserve.config.flags import GIVEN_AS, CommandParser
from vlmserve.config.settings import ServerSettings, load_settings
from vlmserve.frontend.structured_output import make_spec, verify_grammar
from vlmserve.ray.cluster import HERE, OWN, check_address
from vlmserve_common.compute.cpus import available_cpus
from vlmserve_common.errors import BadRequestError

if TYPE_CHECKING:
    from vlmserve.commands.caption.session import Work

_NEED_OUTPUT = (".tar", ".tgz", ".gz", ".parquet", ".pq", ".jsonl", ".ndjson")
_MOST_MEDIA_PROCESSES = 8
_PER_SERVER = 16

_ABOUT = """\
Caption pictures and videos: a few, or millions.

An INPUT is a picture or video, a folder (searched with its subfolders), a pattern in quotes, an http(s) or data: URL, a
list (.txt: one path or URL per line), a .jsonl file (each line a picture or video with fields beside it, a chat
request, or a line of OpenAI's batch form), a .parquet file, a WebDataset .tar, a folder or file of a remote store
(s3://..., by fsspec), or "-" (a list on standard input). Paths in a file are relative to its folder.

Captions go to files beside the pictures, or to --output. Its name chooses the form: captions.jsonl, captions.parquet,
part-%05d.parquet, part-%05d.tar (WebDataset, with the media), or a folder/ of text files.

Finished captions are on disk, and noted in a journal beside the output. The same command, given again, continues a run
that ended for any reason. Identical pictures are captioned once.
"""
_EPILOG = """\
examples:
  vlmserve caption pictures/                                      a .txt beside each picture
  vlmserve caption pictures/ --output captions.jsonl --errors errors.jsonl
  vlmserve caption Qwen/Qwen3-VL-2B-Instruct 'shards/*.tar' --output out-%05d.tar --prompt-file prompt.txt
  vlmserve caption data.parquet --output out.parquet --prompt 'Describe this {{ category }} in one sentence.'
  vlmserve caption requests.jsonl --output answers.jsonl --base-url http://a:8000/v1 --base-url http://b:8000/v1
  vlmserve caption pictures/ --output captions.jsonl --ray head:6379

The exit status is 0 if everything is captioned, 3 if some items failed (the others are captioned), 1 if the run had to
stop, 2 for a wrong command line, 130 if interrupted.
"""
_ADAPTERS = ("enable_lora", "lora_paths", "merge_lora", "max_lora_rank", "lora_partial")
_OWN = "own_"  # the prefix of this command's own flags: --max-pixels is a setting, too
_KINDS: dict[str, type] = {"N": int, "X": float, "FILE": Path}
_SWITCH, _SEVERAL = {"action": "store_true"}, {"action": "append"}
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_SAMPLING = ("temperature", "top_p", "top_k", "min_p", *_PENALTIES)
# The groups of flags: name -> metavar, help, and further arguments of argparse.
_FLAGS: dict[str, dict[str, tuple[Any, ...]]] = {
    "inputs and outputs": {
        "output": ("OUT", "see above; default: files beside the pictures"),
        "errors": ("FILE", "write failed items to FILE, one line of JSON each, with the reasons"),
        "input_format": (None, "the format of all files, whatever their names say", {"choices": get_args(InputFormat)}),
        "media_column": ("NAME", "column or field with the picture or video; default: usual names"),
        "prompt_column": ("NAME", 'column or field with an item\'s own prompt; .jsonl: "prompt"'),
        "id_column": ("NAME", 'column or field with an item\'s name; .jsonl: "id"'),
        "caption_suffix": (".txt|...", "ending of caption files; .json files have all details", {"default": ".txt"}),
        "overwrite": (None, "replace caption files that this command did not write", _SWITCH),
        "items_per_file": ("N", "items in each part of parquet or tars", {"default": 10_000}),
        "journal": ("FILE", "path of the journal; default: beside the output"),
        "restart": (None, "delete the last run's output, and begin again", _SWITCH),
        "retry_failed": (None, "try items again that failed in earlier runs", _SWITCH),
        "shard": ("I/N", "caption only the I-th of N equal parts, counted from 0", {"default": "0/1"}),
        "limit": ("N", "stop after N items"),
    },
    "prompts and sampling": {
        "prompt": ("TEXT", f"Jinja2 template with an item's fields; default: {DEFAULT_PROMPT}"),
        "prompt_file": ("FILE", "read the prompt from FILE; prompt.txt in a picture's folder takes precedence"),
        "system_prompt": ("TEXT", "system prompt of each request"),
        "prefix": ("TEXT", "template of text before each caption", {"default": ""}),
        "suffix": ("TEXT", "template of text after each caption", {"default": ""}),
        "num_captions": ("N", "captions per item", {"default": 1}),
        "max_tokens": ("N", "longest caption, in tokens", {"default": 256}),
        "temperature": ("X", "default: 0, the most likely caption; 0.7 with --num-captions above 1"),
        **{name: ("N" if name == "top_k" else "X", OPTIONS[name].help) for name in _SAMPLING[1:]},
        "stop": ("TEXT", "end captions before this text; may be repeated", _SEVERAL),
        "seed": ("N", "seed of sampling", {"default": 0}),
        "json_schema": ("FILE", "make captions JSON that fits the JSON schema in FILE"),
        "min_pixels": ("N", "smallest area of resized pictures and frames"),
        "max_pixels": ("N", "largest area of resized pictures and frames"),
        "fps": ("X", "frames per second taken of videos"),
        "max_frames": ("N", "most frames taken of a video"),
        "use_audio_in_video": (None, "let the model hear videos, too, if it can", _SWITCH),
    },
    "this process or servers": {
        "base_url": (
            "URL",
            "let the server at http://host:port/v1 do the work; may be repeated",
            _SEVERAL,
        ),
        "api_key": ("KEY", "API key of these servers [env: VLMSERVE_API_KEY]"),
        "request_timeout_s": ("X", "seconds to wait for an answer", {"default": 600.0}),
        "server_timeout_s": (
            "X",
            "seconds without a working server or actor until the run stops",
            {"default": 300.0},
        ),
        "concurrency": (
            "N",
            f"items at a time, with --ray for each actor; default: --max-running-requests, or {_PER_SERVER} for each "
            "server",
        ),
        "memory_gib": ("X", "memory for files of current items, in GiB", {"default": 1.0}),
    },
    "a Ray cluster": {
        "ray": (
            "ADDRESS",
            f"compute on the cluster whose head is at host:port; without ADDRESS, or {HERE}: the one that this machine "
            f"is part of; {OWN}: one on this machine alone",
            {"nargs": "?", "const": HERE},
        ),
        "ray_actors": ("N", "actors with an engine each; default: as many as the cluster has room for"),
        "ray_cpus": (
            "X",
            "CPUs that each actor reserves, which may be a fraction; default: 1 beside GPUs, otherwise a whole node",
        ),
    },
    "": {"json": (None, "print the summary as JSON", _SWITCH)},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CaptionCommand:
    """A command line, checked. prompt, prefix, suffix, system_prompt: see `Prompts`. Other flags have their own names.

    nothing_twice: each picture probably comes once, and prompts share nothing before it, so caches would not help.
    """

    settings: ServerSettings
    run: CaptionSettings
    nothing_twice: bool
    inputs: Sequence[str]
    input_format: InputFormat | None
    columns: Columns
    output: str | None
    caption_suffix: str
    overwrite: bool
    items_per_file: int
    journal: Path | None
    errors: Path | None
    restart: bool
    retry_failed: bool
    shard: ItemShard
    limit: int | None
    prompt: str
    prompt_file: Path | None
    json_schema: Path | None
    system_prompt: str | None
    prefix: str
    suffix: str
    base_urls: Sequence[str]
    request_timeout_s: float
    server_timeout_s: float
    ray: str | None
    ray_actors: int | None
    ray_cpus: float | None
    json: bool


def read_command(argv: Sequence[str]) -> CaptionCommand:
    """Read and check the command line. Raises SettingsError with a line for each problem."""
    return command_of(vars(_parser().parse_intermixed_args(argv)))


def command_of(args: dict[str, Any], **fixed: Any) -> CaptionCommand:
    """Check parsed arguments. fixed: settings that the command decides. Raises SettingsError."""
    given = {name.removeprefix(_OWN): value for name, value in args.items() if name.startswith(_OWN)}
    flags = {name: args[name] for name in args if not name.startswith(_OWN) and name not in ("config", GIVEN_AS)}
    urls: list[str] = given["base_url"] or []
    words = given["words"] if urls else take_model(given["words"], flags)
    if given["api_key"] is not None:
        flags["api_key"] = given["api_key"]
    nothing_twice = _nothing_twice(given, words)
    defaults: dict[str, Any] = {"media_processes": min(_MOST_MEDIA_PROCESSES, available_cpus()), **fixed}
    if nothing_twice:  # caches would not help
        defaults |= {"processor_cache_mib": 0, "disable_radix_cache": True}
    if given["ray"] is not None:
        check_address(given["ray"], "--ray")  # which takes the word behind it, perhaps an INPUT
    settings = load_settings(flags, config=args["config"], defaults=defaults)
    if given["max_pixels"] is not None and settings.engine.max_pixels == AUTO:  # this machine's speed does not decide
        settings = dataclasses.replace(settings, engine=dataclasses.replace(settings.engine, max_pixels=CHECKPOINT))
    problems = list(_problems(given, urls))
    if problems:
        raise SettingsError("\n".join(problems))
    as_given = {field.name: given[field.name] for field in dataclasses.fields(CaptionCommand) if field.name in given}
    more: dict[str, Any] = {
        "inputs": words,
        "columns": Columns(media=given["media_column"], prompt=given["prompt_column"], id=given["id_column"]),
        "shard": _shard(given["shard"]),
        "prompt": _prompt(given["prompt"], given["prompt_file"]),
    }
    most = _PER_SERVER * len(urls) if urls else settings.engine.max_running_requests
    run = CaptionSettings(
        concurrency=given["concurrency"] or most,
        bytes_in_memory=round(given["memory_gib"] * 2**30),
        options=_options(given),
        picture_knobs=_named(given, "min_pixels", "max_pixels"),
        video_knobs=_named(given, "min_pixels", "max_pixels", "fps", "max_frames"),
        seed=given["seed"],
    )
    return CaptionCommand(settings=settings, run=run, nothing_twice=nothing_twice, base_urls=urls, **(as_given | more))


def _parser() -> CommandParser:
    parser = input_parser("caption", about=_ABOUT, epilog=_EPILOG, words=f"{_OWN}words")
    add_flags(parser, {name for group in _FLAGS.values() for name in group})
    add_media_settings(
        parser,
        groups=("memory", "scheduling"),
        more={"attention_backend", "sampling_defaults", "chat_template", "tp_size", "pp_size", *_ADAPTERS},
        left_out={"max_queued_requests", "max_pixels", "video_fps"},  # the last two are this command's own flags
    )
    return parser


def add_flags(parser: CommandParser, names: Collection[str]) -> dict[str, Any]:
    """Add the command's flags of these names. Returns the values of all others."""
    others: dict[str, Any] = {}
    for title, group in _FLAGS.items():
        place = parser.add_argument_group(title) if title and names & group.keys() else parser
        for name, (metavar, text, *how) in group.items():
            if name not in names:
                silent = how[0] if how else {}
                others[_OWN + name] = silent.get("default", False if silent is _SWITCH else None)
                continue
            more: dict[str, Any] = {"metavar": metavar, "type": _KINDS.get(metavar, str)} if metavar else {}
            more |= how[0] if how else {}
            if "default" in more and more["default"] not in ("", None):
                text += f" [default: {more['default']:g}]" if metavar in _KINDS else f" [default: {more['default']}]"
            place.add_argument(f"--{name.replace('_', '-')}", dest=_OWN + name, help=text, **more)
    return others


def _nothing_twice(given: dict[str, Any], words: Sequence[str]) -> bool:
    requests = given["input_format"] == "jsonl" or any(".jsonl" in word or ".ndjson" in word for word in words)
    return not requests and given["num_captions"] == 1 and not given["prompt_column"] and not given["system_prompt"]


def _problems(given: dict[str, Any], urls: Sequence[str]) -> Iterator[str]:
    def refuse(name: str, allowed: str) -> str:
        return f"--{name.replace('_', '-')} is {given[name]!r}; it must be {allowed}"

    for name in ("num_captions", "max_tokens", "items_per_file"):
        if given[name] < 1:
            yield refuse(name, "1 or more")
    for name in ("concurrency", "limit", "min_pixels", "max_pixels", "max_frames", "ray_actors"):
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
    if given["ray_cpus"] is not None and not 0 < given["ray_cpus"] < float("inf"):
        yield refuse("ray_cpus", "above 0, or left out")
    if given["ray"] is None and (given["ray_actors"] is not None or given["ray_cpus"] is not None):
        yield "--ray-actors and --ray-cpus go with --ray"
    if given["ray"] is not None and urls:
        yield "--ray and --base-url: give one"
    if given["api_key"] is not None and not urls:
        yield "--api-key goes with --base-url"
    for url in urls:
        if not url.startswith(("http://", "https://")):
            yield f"--base-url is {url!r}; it must be like http://host:port/v1"


def _shard(text: str) -> ItemShard:
    index, slash, count = text.partition("/")
    if slash and index.isdecimal() and count.isdecimal() and int(index) < int(count):
        return ItemShard(index=int(index), count=int(count))
    raise SettingsError(f"--shard is {text!r}; it must be like 0/4, 1/4, 2/4 or 3/4")


def _prompt(text: str | None, file: Path | None) -> str:
    if file is None:
        return DEFAULT_PROMPT if text is None else text
    with _readable(f"--prompt-file {file}"):
        return file.read_text(encoding="utf-8-sig").strip()


def _options(given: dict[str, Any]) -> dict[str, Any]:
    count = given["num_captions"]
    if count > 1 and given["temperature"] == 0:
        raise SettingsError(f"--num-captions is {count}, but with --temperature 0 all of them would be the same")
    options = {"max_tokens": given["max_tokens"], "temperature": 0.0 if count == 1 else 0.7}
    options |= _named(given, *_SAMPLING)
    if count > 1:
        options["n"] = count
    if given["use_audio_in_video"]:
        options["mm_processor_kwargs"] = {"use_audio_in_video": True}
    if given["json_schema"] is not None:
        options["response_format"] = _json_format(given["json_schema"])
    return options | _named(given, "stop")


def _json_format(file: Path) -> dict[str, Any]:
    with _readable(f"--json-schema {file}"):
        schema = json.loads(file.read_text(encoding="utf-8-sig"))
        verify_grammar(make_spec("json_schema", schema, param=f"--json-schema {file}"))
    return {"type": "json_schema", "json_schema": {"name": "caption", "schema": schema}}


@contextlib.contextmanager
def _readable(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError, RecursionError) as error:
        raise SettingsError(f"{what}: cannot be read: {error}") from None
    except BadRequestError as error:
        raise SettingsError(error.message) from None


def _named(given: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: given[name] for name in names if given[name] is not None}


def words_to_open(command: CaptionCommand) -> list[str]:
    """Return the inputs, without captions of an earlier run that a shell's pattern finds beside the pictures.

    Raises SettingsError for inputs that captions cannot be put beside.
    """
    words = list(command.inputs)
    if command.output is not None:
        return words
    for word in words:
        if scheme_of(word) not in ("", "file") or Path(word).suffix.lower() in _NEED_OUTPUT:
            raise SettingsError(f"INPUT {word!r}: captions cannot be put beside it, name an --output")
    stems = {os.path.splitext(word)[0] for word in words if Path(word).suffix.lower() in (*PICTURES, *VIDEOS)}
    suffix = command.caption_suffix
    return [word for word in words if not (word.endswith(suffix) and word.removesuffix(suffix) in stems)]


def named_folder(word: str) -> Path:
    """Return the folder of a word of the command line. A pattern's folder is the part without magic."""
    path = Path(word).expanduser()
    if word == "-":
        return Path.cwd()
    if path.is_dir():
        return path
    folder = path.parent
    while not folder.is_dir() and glob.has_magic(str(folder)):
        folder = folder.parent
    return folder


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit status. Raises VlmserveError or OSError if the run cannot begin."""
    return run_checked("caption", lambda: run_command(read_command(argv)))


def run_command(command: CaptionCommand, work: Work | None = None) -> int:
    """Run a command, and print how it ended; returns the exit status. work: None makes captions."""
    from vlmserve.commands.batch.inputs.files import StandardInput
    from vlmserve.commands.caption.session import CAPTIONS, Ended, caption
    from vlmserve_common.logs import configure_logging

    work = work or CAPTIONS
    configure_logging(command.settings.log_level, work.name)
    stdin = StandardInput(0)
    try:
        with contextlib.redirect_stdout(sys.stderr):  # Ray prints what nodes say
            ended = caption(command, io.BufferedReader(stdin), sys.stderr, work=work)
    finally:
        stdin.stop()
    print(ended.summary)
    for trouble in ended.troubles:
        print(f"vlmserve {work.name}: error: {trouble}", file=sys.stderr)
    return {
        Ended.FINISHED: 3 if ended.tally.failed or ended.tally.failed_before else 0,
        Ended.STOPPED: 1,
        Ended.INTERRUPTED: INTERRUPTED,
        Ended.TERMINATED: 143,
    }[ended.how]
