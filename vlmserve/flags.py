"""Settings as flags of a command line."""

from __future__ import annotations

import argparse
import typing
from collections.abc import Collection

from vlmserve.checks import flag
from vlmserve.settings import ENV_PREFIX, Setting, iter_settings


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


class CommandParser(argparse.ArgumentParser):
    """Full flag names only, so that a setting added later cannot change what an abbreviation means."""

    def __init__(self, **kwargs: typing.Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **kwargs})


def add_settings(parser: argparse.ArgumentParser, names: Collection[str] | None = None) -> None:
    """Add --config and the flags of settings (of all, by default), in their groups.

    Flags that are not given are left out of the namespace.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    parser.add_argument(
        "--config", metavar="FILE.yaml", help=f"read settings from a YAML file [env: {ENV_PREFIX}CONFIG]"
    )
    for setting in iter_settings():
        if names is not None and setting.name not in names:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        _add_setting(groups[setting.group], setting)


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> None:
    note = "" if setting.default in (None, "", False) else f" [default: {_show(setting.default)}]"
    text = f"{setting.help}{note}".replace("%", "%%")
    if setting.type is bool:
        group.add_argument(flag(setting.name), action="store_true", default=argparse.SUPPRESS, help=text)
        group.add_argument(
            flag("no_" + setting.name),
            dest=setting.name,
            action="store_false",
            default=argparse.SUPPRESS,
            help=argparse.SUPPRESS,
        )
    else:
        group.add_argument(flag(setting.name), default=argparse.SUPPRESS, metavar=_metavar(setting.type), help=text)


def _metavar(type_: typing.Any) -> str:
    if typing.get_origin(type_) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(type_))) + "}"
    kinds = [kind for kind in typing.get_args(type_) or (type_,) if kind is not type(None)]
    return {int: "N", float: "X"}.get(kinds[0], "TEXT")


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)
