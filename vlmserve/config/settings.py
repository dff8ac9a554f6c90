"""The server's settings: command line over environment over YAML file over default.

Every setting is defined once, as a dataclass field with a help text: the engine's in `EngineArgs`, the server's in
`ServerSettings`. The command line's flags (`vlmserve.cli`), the pydantic-settings model that reads the environment and
the YAML file, and the help texts are made from these fields.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_type_hints

from vlmserve.config.aliases import foreign_setting, translated, usual_word
from vlmserve.config.checks import MOST_SECONDS, SettingsError, engine_problems, flag
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.plain_problems import sentence
from vlmserve.config.spelling import did_you_mean

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_settings import BaseSettings

log = logging.getLogger(__name__)

ENV_PREFIX = "VLMSERVE_"


def _arg(default: Any, help: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """What the served form can be told, besides the engine's own settings."""

    engine: EngineArgs
    host: str = _arg("127.0.0.1", "address to listen on; 0.0.0.0 for all (then set --api-key)")
    port: int = _arg(8000, "port to listen on; 0 lets the system choose")
    port_file: str | None = _arg(None, "file that the port is written to once the server answers")
    served_model_name: str | None = _arg(None, "model name of the API; default: MODEL as given")
    api_key: str | None = _arg(
        None, "clients must send 'Authorization: Bearer KEY'; better set by its variable than by the flag"
    )
    log_level: Literal["debug", "info", "warning", "error"] = _arg("info", "least severity logged")
    access_log: bool = _arg(
        False, "log a line for every HTTP request: client, method, path, status, duration and X-Request-Id"
    )
    shutdown_timeout_s: float = _arg(30.0, "seconds that running requests get to finish when the server is stopped")
    startup_timeout_s: float = _arg(
        1800.0, "seconds that loading the model, its encoder processes included, or starting another process may take"
    )
    max_body_mib: float = _arg(64.0, "largest request body, in MiB (inline pictures included)")
    body_timeout_s: float = _arg(
        60.0, "seconds after which a request is dropped of whose body (an upload's, too) nothing more comes"
    )
    max_images_per_request: int = _arg(64, "most pictures in one request")
    max_image_pixels: int = _arg(64_000_000, "largest picture, in pixels; larger ones are refused before decoding")
    max_image_decode_s: float = _arg(
        10.0, "with --media-processes, seconds after which the process that decodes and resizes a picture is ended"
    )
    max_videos_per_request: int = _arg(8, "most videos in one request")
    max_video_bytes: int = _arg(256 * 2**20, "largest video file, in bytes")
    max_video_duration_s: float = _arg(7200.0, "longest video, in seconds")
    max_video_decode_s: float = _arg(300.0, "seconds that decoding one video may take")
    max_video_frame_pixels: int = _arg(4096 * 4096, "largest frame of a video file, in pixels")
    media_max_bytes: int = _arg(64 * 2**20, "largest picture file, in bytes")
    media_timeout_s: float = _arg(20.0, "seconds that fetching one picture may take, redirects included")
    media_max_redirects: int = _arg(3, "redirects followed when fetching a picture")
    allow_private_media: bool = _arg(
        False, "fetch pictures from loopback, private and link-local addresses too: only where all clients are trusted"
    )
    allowed_media_domains: str | None = _arg(
        None,
        "the only hosts that media are fetched from, with commas between them; .example.com stands for all below it; "
        "default: any",
    )
    allowed_local_media_path: str | None = _arg(
        None, "folder that file: URLs may read from; default: file: URLs are refused"
    )
    file_store_dir: str | None = _arg(
        None, "folder that keeps uploaded files across restarts; default: a private one that goes with the server"
    )
    max_file_bytes: int = _arg(256 * 2**20, "largest uploaded file, in bytes")
    max_file_store_bytes: int = _arg(2**30, "all uploaded files together, in bytes")
    max_files: int = _arg(1000, "most uploaded files; 0 takes none")
    file_expire_after_s: float | None = _arg(
        None, "seconds after which an uploaded file is deleted if its upload does not say; default: never"
    )


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting as the command line shows it. type: its annotation, resolved."""

    name: str
    type: Any
    default: Any
    help: str
    group: str


_GROUPS: dict[str, tuple[str, ...]] = {
    "model": ("model", "device", "dtype", "max_model_len", "num_threads", "attention_backend", "sampling_defaults"),
    "HTTP server": (
        "host",
        "port",
        "port_file",
        "served_model_name",
        "api_key",
        "max_body_mib",
        "body_timeout_s",
        "log_level",
        "access_log",
        "startup_timeout_s",
        "shutdown_timeout_s",
    ),
    "pictures": (
        "max_images_per_request",
        "max_image_pixels",
        "max_image_decode_s",
        "media_max_bytes",
        "media_timeout_s",
        "media_max_redirects",
        "allow_private_media",
        "allowed_media_domains",
        "allowed_local_media_path",
        "max_pixels",
        "low_detail_tokens",
        "max_queued_media",
        "max_mm_workers",
        "media_processes",
        "enable_mm_embeds",
        "processor_cache_mib",
    ),
    "vision encoder": (
        "encoder_dp_size",
        "encoder_devices",
        "encoder_threads",
        "encoder_timeout_s",
        "encoder_max_patches",
        "encoder_cache_mib",
        "encoder_host_cache_mib",
        "embedding_cache_dir",
        "embedding_cache_gib",
    ),
    "videos": (
        "max_videos_per_request",
        "max_video_bytes",
        "max_video_duration_s",
        "max_video_decode_s",
        "max_video_frame_pixels",
        "max_video_frames",
        "video_sampling",
        "video_fps",
        "video_frame_cap",
        "video_reference",
    ),
    "uploaded files": (
        "file_store_dir",
        "max_file_bytes",
        "max_file_store_bytes",
        "max_files",
        "file_expire_after_s",
    ),
    "memory": ("mem_fraction_static", "cpu_kv_cache_gib", "max_total_tokens", "page_size", "disable_radix_cache"),
    "scheduling": (
        "max_running_requests",
        "max_queued_requests",
        "schedule_policy",
        "chunked_prefill_size",
        "enable_mixed_chunk",
        "max_prefill_tokens",
        "schedule_conservativeness",
    ),
}
_OTHER = "other"
# Variables that are no settings, or that Kubernetes makes for a service called vlmserve.
_NO_SETTING = re.compile(r"config|test_.*|service_(host|port).*|port_\d+_.*")
_DOMAIN = re.compile(r"\.?[\w-]+(?:\.[\w-]+)*|[\da-fA-F:]+")


def iter_settings() -> Iterator[Setting]:
    """Every setting, group by group in the order of the help; one that no group names comes last, under "other"."""
    known: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for cls in (EngineArgs, ServerSettings):
        types = get_type_hints(cls)
        known |= {f.name: (f, types[f.name]) for f in dataclasses.fields(cls) if f.name != "engine"}
    grouped = {name for names in _GROUPS.values() for name in names}
    rest = tuple(name for name in known if name not in grouped)
    for group, names in [*_GROUPS.items(), (_OTHER, rest)]:
        for name in names:
            field, type_ = known[name]
            default = "" if field.default is dataclasses.MISSING else field.default
            yield Setting(name=name, type=type_, default=default, help=field.metadata["help"], group=group)


def load_settings(
    flags: Mapping[str, Any], *, config: str | None = None, defaults: Mapping[str, Any] | None = None
) -> ServerSettings:
    """Settings from the flags given on the command line, `os.environ`, a YAML file, and the defaults, in that order.

    flags: setting name -> value (strings are parsed); only what was really given. config: the YAML file's path;
    None looks at VLMSERVE_CONFIG. defaults: values of a command's own, where nothing else is said. An unset model
    is "". Raises SettingsError, one line for each problem.
    """
    from pydantic import ValidationError

    known = [setting.name for setting in iter_settings()]
    path = config or os.environ.get(ENV_PREFIX + "CONFIG") or None
    from_yaml = _read_yaml(Path(path)) if path else {}
    lower, places = translated(from_yaml, known, {name: f"{path}: {name}" for name in from_yaml})
    foreign = _foreign_variables(known)
    variables, their_places = translated(foreign, known, {name: ENV_PREFIX + name.upper() for name in foreign})
    lower, places = lower | variables, places | their_places
    reader = _make_reader(lower, defaults or {})
    try:
        read = reader(**flags)
    except ValidationError as error:
        raise SettingsError("\n".join(_explain(error, flags, known, places))) from None
    values = {name: getattr(read, name) for name in reader.model_fields}
    names = {f.name for f in dataclasses.fields(EngineArgs)}
    engine = EngineArgs(**{name: value for name, value in values.items() if name in names})
    settings = ServerSettings(engine=engine, **{name: value for name, value in values.items() if name not in names})
    problems = engine_problems(engine) + _server_problems(settings)
    if problems:
        raise SettingsError("\n".join(problems))
    return settings


def _foreign_variables(known: Collection[str]) -> dict[str, str]:
    """Variables of the environment that set something under the name of another engine. The log warns of those that
    nobody knows."""
    found = {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(ENV_PREFIX).lower()
        if not variable.startswith(ENV_PREFIX) or not value or name in known or _NO_SETTING.fullmatch(name):
            continue
        if foreign_setting(name) is not None:
            found[name] = value
        else:
            guess = did_you_mean(name, map(str.upper, known), prefix=ENV_PREFIX)
            log.warning("the variable %s is of no effect: there is no such setting%s", variable, guess)
    return found


def _make_reader(lower: dict[str, Any], defaults: Mapping[str, Any]) -> type[BaseSettings]:
    """The pydantic-settings model with a field for every setting. lower: values behind flags and
    variables. defaults: behind these."""
    from pydantic import BeforeValidator, create_model
    from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

    class Reader(BaseSettings):
        model_config = SettingsConfigDict(
            env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", protected_namespaces=()
        )

        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=lower)

    def field_of(setting: Setting) -> tuple[Any, Any]:
        usual = BeforeValidator(lambda value: usual_word(setting.name, value))
        return Annotated[setting.type, usual], defaults.get(setting.name, setting.default)

    fields: dict[str, Any] = {setting.name: field_of(setting) for setting in iter_settings()}
    return create_model("Settings", __base__=Reader, **fields)


def _read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file's settings; keys may be written with dashes or underscores."""
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
    """Of PyYAML's, whose own texts take lines and call the file a unicode string."""
    mark, why = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or not why:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {why}"


def _explain(
    error: ValidationError, flags: Mapping[str, Any], known: Collection[str], places: Mapping[str, str]
) -> Iterator[str]:
    """One line for each problem: where the value came from, the value, and what is allowed.

    places: where settings came from that are neither flags nor variables of their own names.
    """
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        variable = ENV_PREFIX + name.upper()
        if name in flags:
            place = flag(name)
        elif name.lower() in known and variable in os.environ:
            place = variable
        else:
            place = places.get(name, name)
        if problem["type"] == "extra_forbidden":
            yield f"{place}: no such setting{did_you_mean(name, known, '; `vlmserve serve --help` lists all')}"
            continue
        yield sentence(problem, place)
        if place == f"{ENV_PREFIX}PORT" and str(problem["input"]).startswith("tcp://"):
            yield "Kubernetes sets that for a service of this name; enableServiceLinks: false in the pod stops it"


def _server_problems(settings: ServerSettings) -> list[str]:
    problems = []

    def refuse(name: str, allowed: str) -> None:
        problems.append(f"{flag(name)} is {getattr(settings, name)!r}; it must be {allowed}")

    if not 0 <= settings.port <= 65535:
        refuse("port", "between 0 and 65535")
    if not 0 < settings.max_body_mib < math.inf:
        refuse("max_body_mib", "above 0, and finite")
    decode_times = ("max_image_decode_s", "max_video_duration_s", "max_video_decode_s")
    for name in ("media_timeout_s", "startup_timeout_s", "body_timeout_s", *decode_times):
        if not 0 < getattr(settings, name) <= MOST_SECONDS:
            refuse(name, f"above 0 and at most {MOST_SECONDS}")
    if not 0 <= settings.shutdown_timeout_s <= MOST_SECONDS:
        refuse("shutdown_timeout_s", f"0 or more, at most {MOST_SECONDS}")
    counts = ("media_max_redirects", "max_images_per_request", "max_videos_per_request", "max_files")
    for name in counts:
        if not getattr(settings, name) >= 0:
            refuse(name, "0 or more")
    file_sizes = ("media_max_bytes", "max_video_bytes", "max_file_bytes", "max_file_store_bytes")
    for name in ("max_image_pixels", "max_video_frame_pixels", *file_sizes):
        if getattr(settings, name) < 1:
            refuse(name, "1 or more")
    if settings.file_expire_after_s is not None and not 0 < settings.file_expire_after_s < math.inf:
        refuse("file_expire_after_s", "above 0, and finite")
    store = settings.file_store_dir
    if store is not None and not (store and Path(store).is_dir() and os.access(store, os.W_OK | os.X_OK)):
        refuse("file_store_dir", "an existing folder that can be written to")
    domains = settings.allowed_media_domains
    if domains is not None and not all(_DOMAIN.fullmatch(domain) for domain in domains.split(",")):
        refuse("allowed_media_domains", "host names such as example.com or .example.com, with commas between them")
    if settings.api_key == "":
        refuse("api_key", "a key, or left out")
    local = settings.allowed_local_media_path
    if local is not None and not (local and Path(local).is_dir()):
        refuse("allowed_local_media_path", "an existing folder")
    return problems
