"""Settings as flags of a command line."""

from __future__ import annotations

import argparse
import contextlib
import math
import typing
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

from vlmserve.config.aliases import ALIASES, Alias, our_settings
from vlmserve.config.checks import SettingsError
from vlmserve.config.fields import flag
from vlmserve.config.plain_problems import did_you_mean
from vlmserve.config.settings import ENV_PREFIX, Setting, iter_settings

GIVEN_AS = "given_as"
"""The place in a namespace of other engines' flags: our setting -> the flag that set it."""
_PROBLEMS = "problems_of_aliases"


class _Formatter(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34, width=120)


class CommandParser(argparse.ArgumentParser):
    """A parser of full flag names only, so that a new setting cannot change the meaning of an abbreviation. For an
    unknown word it suggests a known one."""

    def __init__(self, **kwargs: typing.Any) -> None:
        super().__init__(**{"allow_abbrev": False, "formatter_class": _Formatter, **kwargs})

    def parse_args(  # type: ignore[override]  # without argparse's overloads
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line; end the process with status 2 for unknown words."""
        return self._nothing_left(*self.parse_known_args(args, namespace))

    def parse_intermixed_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line as `parse_args` does, with flags anywhere between the words."""
        return self._nothing_left(*self.parse_known_intermixed_args(args, namespace))

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse a command line; end the process with status 2 for flags of other engines that have no meaning here."""
        found, left = super().parse_known_args(args, namespace)
        if problems := vars(found).pop(_PROBLEMS, None):
            self._complain(problems)
        return found, left

    def _nothing_left(self, found: argparse.Namespace, left: Sequence[str]) -> argparse.Namespace:
        if left:
            parsers = list(_parsers(self, found))
            names = [word.partition("=")[0] for word in left if word.startswith("-")]
            known = [
                word
                for parser in parsers
                for word, action in parser._option_string_actions.items()
                if not (isinstance(action, _AliasFlag) and action.refused)
            ]
            unknown = [f"there is no {name}{did_you_mean(name, known)}" for name in names]
            parsers[-1]._complain(unknown or [f"there is no place for {' '.join(left)!r}"])
        return found

    def _complain(self, problems: Sequence[str]) -> typing.NoReturn:
        self.error(f"\n{self.prog}: error: ".join(problems))

    def _check_value(self, action: argparse.Action, value: typing.Any) -> None:
        if action.choices is not None and value not in action.choices:
            names = list(map(str, action.choices))
            guess = did_you_mean(str(value), names)
            raise argparse.ArgumentError(action, f"{value!r} is none of {', '.join(names)}{guess}")

    def _get_value(self, action: argparse.Action, arg_string: str) -> typing.Any:
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError:
            if action.type not in (int, float):
                raise
            kind = "a whole number" if action.type is int else "a number"
            raise argparse.ArgumentError(action, f"it is {arg_string!r}, and must be {kind}") from None


class _AliasFlag(argparse.Action):
    """A flag of another engine. It sets our setting, or notes why not, so that all such flags are told at once."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, alias: Alias, value: bool | None = None) -> None:
        self.refused = bool(alias.instead or alias.advice)
        nargs = 0 if alias.switch else "?" if self.refused else None
        super().__init__(option_strings, argparse.SUPPRESS, nargs=nargs, help=argparse.SUPPRESS)
        self._alias = alias
        self._switched = value

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: typing.Any,
        option_string: str | None = None,
    ) -> None:
        place = option_string or self.option_strings[0]
        try:
            ours = our_settings(self._alias, self._switched if self._alias.switch else values, place)
        except SettingsError as error:
            vars(namespace).setdefault(_PROBLEMS, []).append(str(error))
            return
        given_as = vars(namespace).setdefault(GIVEN_AS, {})
        for name, value in ours.items():
            setattr(namespace, name, value)
            given_as[name] = place


class _Joined(argparse.Action):
    """A flag with several words, which become one text with commas between them."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: typing.Any,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, ",".join(values))


class _HelpAll(argparse.Action):
    """The flag --help-all, which prints the help with all settings. texts: the parts that --help leaves out."""

    def __init__(self, option_strings: Sequence[str], dest: str, *, texts: dict[argparse.Action, str]) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="show all settings, and exit")
        self._texts = texts

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        for action, text in self._texts.items():
            action.help = text
        parser.print_help()
        parser.exit()


def add_settings(
    parser: argparse.ArgumentParser, names: Collection[str] | None = None, *, help_all: bool = True
) -> None:
    """Add --config and the flags of settings, in their groups: of all settings, by default, or of those named.

    Flags that are not given are left out of the namespace. help_all: --help shows the common settings only, and
    --help-all shows all of them.
    """
    groups: dict[str, argparse._ArgumentGroup] = {}
    hidden: dict[argparse.Action, str] = {}
    if help_all:
        parser.add_argument("--help-all", action=_HelpAll, texts=hidden)
    parser.add_argument(
        "--config", metavar="FILE.yaml", help=f"read settings from a YAML file [env: {ENV_PREFIX}CONFIG]"
    )
    for setting in iter_settings():
        if names is not None and setting.name not in names:
            continue
        if setting.group not in groups:
            groups[setting.group] = parser.add_argument_group(setting.group)
        action = _add_setting(groups[setting.group], setting)
        if help_all and not setting.common:
            hidden[action], action.help = str(action.help), argparse.SUPPRESS
    for name, alias in ALIASES.items():
        if names is None or (set(alias.sets) <= set(names) and not alias.advice):
            _add_alias(parser, name, alias)


def in_the_users_words(problem: str, given_as: typing.Mapping[str, str]) -> str:
    """Return a complaint about one of our settings, beginning with the flag that set it. given_as: see `GIVEN_AS`."""
    for name, place in given_as.items():
        if problem.startswith(f"{flag(name)} "):
            return f"{place} (here {flag(name)}){problem.removeprefix(flag(name))}"
    return problem


def _add_setting(group: argparse._ArgumentGroup, setting: Setting) -> argparse.Action:
    note = "" if setting.default in (None, "", False) else f" [default: {_show(setting.default)}]"
    text = f"{setting.help}{note}".replace("%", "%%")
    if setting.type is not bool:
        kind = _metavar(setting.type)
        if setting.several:
            return group.add_argument(
                flag(setting.name), action=_Joined, nargs="+", default=argparse.SUPPRESS, metavar=kind, help=text
            )
        return group.add_argument(flag(setting.name), default=argparse.SUPPRESS, metavar=kind, help=text)
    group.add_argument(
        flag("no_" + setting.name),
        dest=setting.name,
        action="store_false",
        default=argparse.SUPPRESS,
        help=argparse.SUPPRESS,
    )
    return group.add_argument(flag(setting.name), action="store_true", default=argparse.SUPPRESS, help=text)


def _add_alias(parser: argparse.ArgumentParser, name: str, alias: Alias) -> None:
    words = [flag(name)] if len(name) > 1 else []
    words += [f"-{name}"] if len(name) <= 3 else []
    if not any(word in parser._option_string_actions for word in words):
        parser.add_argument(*words, action=_AliasFlag, alias=alias, value=True)
    if alias.switch:
        parser.add_argument(flag(f"no_{name}"), action=_AliasFlag, alias=alias, value=False)


def _parsers(parser: CommandParser, found: argparse.Namespace) -> Iterator[CommandParser]:
    """Yield a parser, and the parsers of the commands that are named, the last one last."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            chosen = action.choices.get(getattr(found, action.dest, ""))
            if chosen is not None:
                yield from _parsers(chosen, found)


def _metavar(type_: typing.Any) -> str:
    if typing.get_origin(type_) is typing.Literal:
        return "{" + ",".join(map(str, typing.get_args(type_))) + "}"
    kinds = [kind for kind in typing.get_args(type_) or (type_,) if kind is not type(None)]
    return {int: "N", float: "X"}.get(kinds[0], "TEXT")


def _show(value: object) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    return str(value)


def _number(kind: Callable[[str], float], good: Callable[[float], bool], allowed: str) -> Callable[[str], Any]:
    def parse(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if good(value):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} must be {allowed}")

    return parse


positive = _number(int, lambda value: value >= 1, "a whole number of 1 or more")
not_negative = _number(int, lambda value: value >= 0, "a whole number of 0 or more")
above_zero = _number(float, lambda value: 0 < value < math.inf, "a number above 0")
