"""The server's settings: command line over environment over YAML file over default.

Every setting is defined once, as a dataclass field with a help text: the engine's in `EngineArgs`, the server's in
`ServerSettings`. These fields make the flags, the pydantic model that checks values, and the help texts.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from vlmserve.config.aliases import is_alias, translated, usual_word
from vlmserve.config.checks import SettingsError, engine_problems
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import (
    ABOVE_0,
    AT_LEAST_0,
    AT_LEAST_1,
    MOST_SECONDS,
    SECONDS,
    Allowed,
    flag,
    problem,
    range_problems,
    settings_of,
)
from vlmserve.config.plain_problems import did_you_mean, sentence

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError

log = logging.getLogger(__name__)

ENV_PREFIX = "VLMSERVE_"
_GROUPS = (
    "model",
    "HTTP server",
    "pictures",
    "vision encoder",
    "videos",
    "sounds",
    "uploaded files",
    "memory",
    "several devices",
    "scheduling",
    "adapters",
    "other",
)
_http, _pictures, _videos, _files = map(settings_of, ("HTTP server", "pictures", "videos", "uploaded files"))
_sounds = settings_of("sounds")
# Variables that are no settings, or that Kubernetes makes for a service called vlmserve.
_NO_SETTING = re.compile(r"config|cpu_level|upstream_api_key|test_.*|service_(host|port).*|port_\d+_.*")
_DOMAIN = re.compile(r"\.?[\w-]+(?:\.[\w-]+)*|[\da-fA-F:]+")

_PORT = Allowed(words="between 0 and 65535", holds=lambda value: 0 <= value <= 65535)
_PATIENCE = Allowed(words=f"0 or more, at most {MOST_SECONDS}", holds=lambda value: 0 <= value <= MOST_SECONDS)
_KEY = Allowed(words="a key", holds=bool)
_FILE = Allowed(words="an existing file", holds=os.path.isfile)
_FOLDER = Allowed(words="an existing folder", holds=os.path.isdir)
_WRITABLE = Allowed(
    words="an existing folder that can be written to",
    holds=lambda path: os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK),
)
_PREFIXES = Allowed(
    words="vllm, sglang, or both with a comma between them",
    holds=lambda names: {"vllm", "sglang"}.issuperset(names.split(",")),
)
_URL = Allowed(words="an http: or https: URL", holds=lambda url: re.fullmatch(r"https?://\S+", url))
_DOMAINS = Allowed(
    words="host names such as example.com or .example.com, with commas between them",
    holds=lambda names: all(map(_DOMAIN.fullmatch, names.split(","))),
)
_HOSTS = Allowed(
    words="host names such as example.com or .example.com, with commas between them, or *",
    holds=lambda names: names == "*" or all(map(_DOMAIN.fullmatch, names.split(","))),
)
_DATABASE = Allowed(
    words="a URL such as postgresql://USER:PASSWORD@HOST:5432/DATABASE",
    holds=lambda url: re.fullmatch(r"postgres(ql)?://\S+", url),
    secret=True,
)
_STORE = Allowed(
    words="a URL such as s3://BUCKET/FOLDER or file:///FOLDER",
    holds=lambda url: re.fullmatch(r"[a-z][a-z\d+.-]*://\S+", url),
    secret=True,
)
_ORIGINS = Allowed(
    words="origins such as https://app.example.com, with commas between them, or *",
    holds=lambda origins: origins == "*" or all(re.fullmatch(r"[\w+.-]+://[^\s/,]+", o) for o in origins.split(",")),
)


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """The settings of a server, besides the engine's."""

    engine: EngineArgs
    host: str = _http("127.0.0.1", "address to listen on; 0.0.0.0 for all: then set --api-key", common=True)
    port: int = _http(8000, "port to listen on; 0 lets the system choose", _PORT, common=True)
    port_file: str | None = _http(None, "file that the port is written to once the server answers")
    served_model_name: str | None = _http(None, "the model's name in the API; default: MODEL as given", common=True)
    api_key: str | None = _http(
        None,
        "key that clients must send (Authorization: Bearer KEY); set it by its variable, which others cannot read",
        _KEY,
        common=True,
    )
    api_key_file: str | None = _http(
        None,
        "file with a client's name and key, or the key's sha256:DIGEST, in each line; --api-key may be set as well",
        _FILE,
    )
    cache_scope: Literal["auto", "key", "all"] = _http(
        "auto",
        "who shares cached prefixes and pictures, which answer sooner: key: requests of the same name in "
        "--api-key-file; all: all requests; auto: key if there is such a file",
    )
    allowed_hosts: str | None = _http(
        None,
        "host names that a server without API keys answers to, besides localhost and addresses; with commas "
        "between them; .example.com means all below it; *: any",
        _HOSTS,
    )
    allowed_origins: str | None = _http(
        None,
        "web pages that may use the server, such as https://app.example.com, with commas between them; *: all",
        _ORIGINS,
        common=True,
    )
    max_connections: int = _http(
        2048, "most connections at a time; fewer where the system allows few open files", AT_LEAST_1
    )
    header_timeout_s: float = _http(10.0, "seconds in which a request's headers must have come", SECONDS)
    keep_alive_timeout_s: float = _http(5.0, "seconds that an idle connection is kept for its next request", SECONDS)
    send_timeout_s: float = _http(
        60.0, "seconds without progress after which the connection of a client that does not read is cut", SECONDS
    )
    tool_call_parser: Literal["auto", "hermes", "qwen3_coder"] = _http(
        "auto", "how the model writes calls of tools; auto: as its chat template does"
    )
    reasoning_parser: Literal["auto", "qwen3", "none"] = _http(
        "auto",
        "how the model writes its thoughts, which come as reasoning_content: qwen3 is <think>...</think>; none: they "
        "stay in the answer; auto: qwen3 if its chat template has <think>",
    )
    max_body_mib: float = _http(64.0, "largest request body, in MiB (inline pictures included)", ABOVE_0)
    max_bodies_mib: float = _http(
        1024.0,
        "memory for the bodies of all unfinished requests together, and as much again for frames of live video that "
        "wait, in MiB; at least --max-body-mib",
        ABOVE_0,
    )
    body_timeout_s: float = _http(
        30.0, "seconds without a byte of a request's body or upload, after which it is dropped", SECONDS
    )
    min_body_bytes_per_s: int = _http(
        500,
        "slowest request body or upload, in bytes a second; checked every --body-timeout-s; 0: no limit",
        AT_LEAST_0,
    )
    max_json_values: int = _http(
        500_000,
        "most commas, opening brackets and quotation marks in a JSON body, counted before it is read",
        AT_LEAST_1,
    )
    max_items_per_request: int = _http(
        4096, "most messages, tools, prompts, or items to score in one request", AT_LEAST_1
    )
    max_parts_per_request: int = _http(
        8192, "most parts and calls in the messages of one request, all together", AT_LEAST_1
    )
    log_level: Literal["debug", "info", "warning", "error"] = _http(
        "info", "log messages of this severity and above", common=True
    )
    forwarded_allow_ips: str = _http(
        "127.0.0.1",
        "proxies whose X-Forwarded-For names the client: addresses or networks with commas between them; *: all",
    )
    access_log: bool = _http(
        False, "log a line for each HTTP request: client, method, path, status, duration, X-Request-Id"
    )
    log_requests: bool = _http(
        False,
        "log a line for each answer: id, tokens, how it ended, and the seconds of each stage; no contents",
        common=True,
    )
    metrics_prefixes: str | None = _http(
        None,
        "show metrics under the names of other engines, too: vllm, sglang, or both with a comma; default: ours only",
        _PREFIXES,
    )
    otlp_traces_endpoint: str | None = _http(
        None,
        "URL that gets a trace of each request, by OTLP over HTTP (http://HOST:4318/v1/traces); needs vlmserve[otel]",
        _URL,
    )
    startup_timeout_s: float = _http(1800.0, "seconds that loading the model, or starting a process, may take", SECONDS)
    shutdown_timeout_s: float = _http(
        30.0, "seconds that running requests and threads get when the server is stopped", _PATIENCE
    )
    watchdog_timeout_s: float = _http(
        300.0,
        "longest step of the scheduler or the detokenizer, in seconds; after that its stacks are logged and the server "
        "ends with an error; 0: no limit",
        _PATIENCE,
    )
    request_timeout_s: float = _http(
        0.0,
        "seconds from a request's arrival to its whole answer, after which it is answered 504; 0: no limit",
        _PATIENCE,
        common=True,
    )
    admin_api_key: str | None = _http(
        None,
        "key for the endpoints that control the server (docs/api.md), in place of --api-key; set it by its variable",
        _KEY,
    )
    profile_dir: str | None = _http(
        None, "folder for the traces of POST /start_profile; default: profiling is refused", _WRITABLE
    )
    max_images_per_request: int = _pictures(64, "most pictures in one request", AT_LEAST_0, common=True)
    max_image_pixels: int = _pictures(64_000_000, "largest picture, in pixels; checked before decoding", AT_LEAST_1)
    max_image_decode_s: float = _pictures(
        10.0, "seconds for decoding and resizing one picture; kept by --media-processes, not by threads", SECONDS
    )
    media_max_bytes: int = _pictures(64 * 2**20, "largest picture file, in bytes", AT_LEAST_1)
    media_timeout_s: float = _pictures(20.0, "seconds for fetching one picture or video, redirects included", SECONDS)
    media_max_redirects: int = _pictures(3, "most redirects of one fetch", AT_LEAST_0)
    allow_private_media: bool = _pictures(
        False,
        "fetch from loopback, private and link-local addresses, too; only where you trust all clients",
        common=True,
    )
    allowed_media_domains: str | None = _pictures(
        None,
        "the only hosts to fetch from, with commas between them; .example.com means all below it; default: any",
        _DOMAINS,
    )
    allowed_live_hosts: str | None = _videos(
        None,
        "hosts whose live video the server may pull for sessions, with commas between them; .example.com means all "
        "below it; default: none",
        _DOMAINS,
    )
    max_live_pulls: int = _videos(8, "most streams that the server pulls at a time; each has a process", AT_LEAST_0)
    allowed_local_media_path: str | None = _pictures(
        None, "folder that file: URLs may read; default: file: URLs are refused", _FOLDER, common=True
    )
    max_videos_per_request: int = _videos(8, "most videos in one request", AT_LEAST_0)
    max_video_bytes: int = _videos(256 * 2**20, "largest video file, in bytes", AT_LEAST_1)
    max_video_duration_s: float = _videos(7200.0, "longest video, in seconds", SECONDS)
    max_video_decode_s: float = _videos(300.0, "seconds for decoding one video, or one list of frames", SECONDS)
    max_video_frame_pixels: int = _videos(4096 * 4096, "largest frame of a video file, in pixels", AT_LEAST_1)
    max_audios_per_request: int = _sounds(16, "most sounds in one request, without those of videos", AT_LEAST_0)
    max_audio_bytes: int = _sounds(128 * 2**20, "largest sound file, in bytes", AT_LEAST_1)
    max_audio_duration_s: float = _sounds(3600.0, "longest sound, in seconds, also of a video", SECONDS)
    max_audio_channels: int = _sounds(16, "most channels of a sound, which are averaged", AT_LEAST_1)
    max_audio_decode_s: float = _sounds(60.0, "seconds for decoding one sound", SECONDS)
    file_store_dir: str | None = _files(
        None,
        "folder that keeps uploaded files across restarts; default: a private one, removed with the server",
        _WRITABLE,
        common=True,
    )
    database_url: str | None = _files(
        None,
        "PostgreSQL database in which several servers keep files, batches and responses together (docs/deployment.md): "
        "postgresql://USER:PASSWORD@HOST/DATABASE; set it by its variable; needs vlmserve[postgres]",
        _DATABASE,
    )
    file_store_url: str | None = _files(
        None,
        "where the bytes of uploaded files go, by a URL that fsspec knows: s3://BUCKET/FOLDER, file:///FOLDER; needed "
        "with --database-url; default: --file-store-dir",
        _STORE,
    )
    max_file_bytes: int = _files(256 * 2**20, "largest uploaded file, in bytes", AT_LEAST_1)
    max_file_store_bytes: int = _files(2**30, "all uploaded files together, in bytes", AT_LEAST_1)
    max_files: int = _files(1000, "most uploaded files; 0 takes none", AT_LEAST_0)
    file_expire_after_s: float | None = _files(
        None, "seconds after which uploaded files are deleted, unless the upload says; default: never", ABOVE_0
    )
    max_stored_responses: int = _files(
        1000, "most responses that are kept for those that go on from them, beside the files; 0 keeps none", AT_LEAST_0
    )
    max_stored_response_bytes: int = _files(2**28, "all kept responses together, in bytes of JSON", AT_LEAST_0)
    max_response_media_bytes: int = _files(
        2**29,
        "processed pictures of kept responses, for those that go on from them, in bytes; 0: they are loaded again",
        AT_LEAST_0,
    )
    max_open_sessions: int = _http(256, "most sessions (/v1/sessions) at a time; 0: none", AT_LEAST_0)
    max_open_sessions_per_key: int = _http(64, "most sessions of one API key at a time", AT_LEAST_1)
    max_open_session_tokens: int | None = _http(
        None, "most tokens in the conversation of a session; default: the context length", AT_LEAST_1
    )
    max_open_session_bytes: int = _http(
        2**30, "texts and processed pictures of all sessions together, in bytes", AT_LEAST_0
    )
    open_session_timeout_s: float = _http(
        600.0, "seconds after its last use that a session is kept; a client may ask for less", SECONDS
    )
    batch_concurrency: int = _files(
        8, "most lines of batches answered at a time; they wait while requests fill the engine", AT_LEAST_1
    )
    max_batch_lines: int = _files(50_000, "most lines of a batch's input file, blank ones included", AT_LEAST_1)
    max_batches: int = _files(100, "most unfinished batches; 0: take none", AT_LEAST_0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting as the command line shows it. type: its resolved annotation. common: people change it. several: of
    several words."""

    name: str
    type: Any
    default: Any
    help: str
    group: str
    common: bool
    several: bool


def iter_settings() -> Iterator[Setting]:
    """Yield every setting, group by group in the order of the help."""
    settings = []
    for cls in (ServerSettings, EngineArgs):
        types = get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name != "engine":
                default = "" if field.default is dataclasses.MISSING else field.default
                about = {name: field.metadata[name] for name in ("help", "group", "common", "several")}
                settings.append(Setting(name=field.name, type=types[field.name], default=default, **about))
    yield from sorted(settings, key=lambda setting: _GROUPS.index(setting.group))


def load_settings(
    flags: Mapping[str, Any], *, config: str | None = None, defaults: Mapping[str, Any] | None = None
) -> ServerSettings:
    """Load settings from flags, `os.environ`, a YAML file, and the defaults, in that order.

    flags: setting name -> value, for the given flags only; strings are parsed. config: the YAML file's path; None:
    VLMSERVE_CONFIG names it. defaults: a command's own defaults. A model that is not set is "". Raises SettingsError
    with one line for each problem.
    """
    from pydantic import ValidationError

    settings = {setting.name: setting for setting in iter_settings()}
    path = config or os.environ.get(ENV_PREFIX + "CONFIG") or None
    from_yaml = _read_yaml(Path(path)) if path else {}
    foreign, ours = _variables(settings)
    given = dict(defaults or {})
    places: dict[str, str] = {}
    for values, prefix in ((from_yaml, f"{path}: "), (foreign, ENV_PREFIX), (ours, ENV_PREFIX), (flags, "--")):
        found, found_at = translated(values, settings, {name: _place(prefix, name) for name in values})
        given, places = given | found, places | found_at
    try:
        read = _reader()(**{name: usual_word(name, value) for name, value in given.items()})
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, settings, places))) from None
    of_engine = {field.name for field in dataclasses.fields(EngineArgs)}
    engine = EngineArgs(**{name: getattr(read, name) for name in of_engine})
    whole = ServerSettings(engine=engine, **{name: getattr(read, name) for name in settings.keys() - of_engine})
    problems = engine_problems(engine) + range_problems(whole)
    if 0 < whole.request_timeout_s < (engine.max_time_between_tokens_s or 0):
        allowed = f"at most --request-timeout-s, which is {whole.request_timeout_s:g}"
        problems.append(problem(engine, "max_time_between_tokens_s", allowed))
    if whole.database_url is not None and (whole.file_store_url is None or whole.file_store_dir is not None):
        what = "the bytes of files have to go where all servers reach them"
        problems.append(f"--database-url needs --file-store-url, and no --file-store-dir: {what}")
    if problems:
        raise SettingsError("\n".join(problems))
    return whole


@functools.cache
def _reader() -> type[BaseModel]:
    """Return the model that checks and converts the values, with a field for every setting."""
    from pydantic import ConfigDict, Field, create_model

    fields: dict[str, Any] = {setting.name: (setting.type, setting.default) for setting in iter_settings()}
    for name, (kind, default) in fields.items():
        if kind == int | str:  # digits are a number, also where all values are texts
            fields[name] = Annotated[kind, Field(union_mode="left_to_right")], default
    return create_model("Settings", __config__=ConfigDict(extra="forbid", protected_namespaces=()), **fields)


def _place(prefix: str, name: str) -> str:
    """Return where a setting was given, for errors."""
    if prefix == ENV_PREFIX:
        return prefix + name.upper()
    return flag(name) if prefix == "--" else prefix + name


def _variables(known: Collection[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return the environment's settings: those under names of other engines, and those under ours. Variables without an
    effect are logged."""
    foreign, ours = {}, {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or not value or _NO_SETTING.fullmatch(name):
            continue
        if name in known:
            ours[name] = value
        elif is_alias(name):
            foreign[name] = value
        else:
            guess = did_you_mean(name, map(str.upper, known), prefix=ENV_PREFIX)
            log.warning("the variable %s is of no effect: there is no such setting%s", variable, guess)
    return foreign, ours


def _read_yaml(path: Path) -> dict[str, Any]:
    """Return a YAML file's settings. Keys may have dashes or underscores."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"--config {path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise SettingsError(f"--config {path}: cannot be read: it is no text in UTF-8") from None
    except yaml.YAMLError as error:
        raise SettingsError(f"--config {path}: not YAML: {_where_and_why(error)}") from None
    if content is None:
        return {}
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise SettingsError(f"--config {path}: must hold 'setting: value' lines, for example 'page-size: 16'")
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name in values:
            raise SettingsError(f"--config {path}: {key!r} is given twice")
        values[name] = value
    return values


def _where_and_why(error: Exception) -> str:
    """Return an error of PyYAML in one line."""
    mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not why:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}"


def _explain(error: ValidationError, known: Collection[str], places: Mapping[str, str]) -> Iterator[str]:
    """Yield one line for each problem: the place of the value, the value, and the allowed values."""
    for one in error.errors(include_url=False):
        name = str(one["loc"][0])
        place = places.get(name, name)
        if one["type"] == "extra_forbidden":
            yield f"{place}: no such setting{did_you_mean(name, known, '; `vlmserve serve --help-all` lists all')}"
            continue
        if len(one["loc"]) > 1 and one["loc"][1] != "int":  # of a number or a word, once is enough
            continue
        yield sentence(one, place)
        if place == f"{ENV_PREFIX}PORT" and str(one["input"]).startswith("tcp://"):
            yield "Kubernetes sets that for a service of this name; enableServiceLinks: false in the pod stops it"
