"""Makes docs/flags.md (python -m docs.settings_pages > docs/flags.md), and the table of docs/flags-of-others.md."""

from __future__ import annotations

import dataclasses
import itertools
import typing
from collections.abc import Iterator

from vlmserve.config.aliases import ALIASES, ANY
from vlmserve.config.engine_args import EngineArgs
from vlmserve.config.fields import flag
from vlmserve.config.settings import ENV_PREFIX, Setting, iter_settings

_HEAD = """\
# Settings

All settings of `vlmserve serve`: first [those that people change](#common-settings), which `--help` shows, then
[the rest](#other-settings), which `--help-all` adds. `make docs` makes this page from the settings themselves.

Each setting is a flag, an environment variable, and a key of the YAML file that `--config` (or `VLMSERVE_CONFIG`)
names. The flag wins over the variable, the variable over the file, the file over the default.

- A key of the file is the flag without its two dashes: `page-size: 16`.
- A setting that is on or off is a flag without a value. It has a `--no-` form (`--no-access-log`), and a variable of 1
  or 0.
- A setting with a "yes" is also an argument of `LLM(...)`, with underscores (`page_size=16`):
  [llm.md](llm.md#settings).

`configs/` has presets.
"""
_OFFLINE = {field.name for field in dataclasses.fields(EngineArgs)} | {
    "max_images_per_request",
    "max_videos_per_request",
    "max_audios_per_request",
}
_NOTHING = "refused: there is nothing like it"
_KINDS = {int: "whole number", float: "number", str: "text", bool: "on or off"}


def make_page() -> str:
    """Return the page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _HEAD.rstrip()
    for title, common in (("Common settings", True), ("Other settings", False)):
        yield from ("", f"## {title}")
        level = [setting for setting in iter_settings() if setting.common == common]
        for group, settings in itertools.groupby(level, key=lambda setting: setting.group):
            yield from ("", f"### {group[0].upper()}{group[1:]}", "")
            yield from ("| Flag | Variable | Type | Default | `LLM` | Meaning |", "|---|---|---|---|---|---|")
            yield from map(_row, settings)


def _row(setting: Setting) -> str:
    variable = ENV_PREFIX + setting.name.upper()
    offline = "yes" if setting.name in _OFFLINE else ""
    names = (f"`{flag(setting.name)}`", f"`{variable}`")
    cells = (*names, _kind(setting.type), _default(setting.default), offline, setting.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _kind(type_: typing.Any) -> str:
    if typing.get_origin(type_) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(type_))
    kinds = [kind for kind in typing.get_args(type_) or (type_,) if kind is not type(None)]
    return " or ".join(_KINDS[kind] for kind in kinds)


def _default(value: object) -> str:
    if value in (None, ""):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def make_table() -> str:
    """Return the table of other engines' settings, as docs/flags-of-others.md has it."""
    rows: dict[str, list[str]] = {}
    for name, alias in ALIASES.items():
        words = " or ".join(f"`{word}`" for word in alias.taken)
        if alias.sets or alias.instead:
            values = alias.convert(True) if alias.switch and alias.convert else {}
            ours = [f"no_{one}" if values.get(one) is False else one for one in alias.sets or alias.instead]
            here = ("" if alias.sets else "refused; use ") + ", ".join(map(_as_flag, ours))
        else:
            here = "taken, without effect" if ANY in alias.taken else f"only {words} is taken, without effect"
            here = "only the `--no-` form is taken, without effect" if alias.taken == ("false",) else here
            here = here if alias.taken else f"refused; {alias.advice}" if alias.advice else _NOTHING
            here = "a number up to 20 is taken, without effect" if name == "max_logprobs" else here
        rows.setdefault(here, []).append(_as_flag(name))
    lines = [f"| {', '.join(names)} | {here} |" for here, names in rows.items()]
    return "\n".join(["| vLLM, SGLang, llama.cpp | here |", "|---|---|", *lines]) + "\n"


def _as_flag(name: str) -> str:
    return f"`-{name}`" if len(name) <= 3 else f"`{flag(name)}`"


if __name__ == "__main__":
    print(make_page(), end="")
