"""Applies the table of `config.other_engines`: settings by the names of vLLM and SGLang become ours, or an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from vlmserve.config.checks import SettingsError
from vlmserve.config.other_engines import ANY, BY_NAME, VALUES, ForeignSetting

_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")


def foreign_setting(name: str) -> tuple[ForeignSetting, bool] | None:
    """The setting of another engine that a name stands for, and whether it is turned off by it (no_x); None if none."""
    if name in BY_NAME:
        return BY_NAME[name], False
    setting = BY_NAME.get(name.removeprefix("no_"))
    return (setting, True) if setting is not None and setting.switch else None


def our_settings(setting: ForeignSetting, value: Any, place: str) -> dict[str, Any]:
    """What it comes to here: our settings and their values. place: where it was given, for errors.

    Raises SettingsError with the table's answer where there is no such thing here.
    """
    if setting.switch:
        value = _on_or_off(value, place)
    try:
        if setting.convert is not None:
            return dict(setting.convert(value))
    except SettingsError as error:
        raise SettingsError(f"{place} is {value!r}: {error}") from None
    if setting.sets:
        return {setting.sets[0]: not value if setting.negated else value}
    if ANY in setting.fine or str(value).lower() in setting.fine:
        return {}
    shown = place if setting.switch else f"{place} is {value!r}"
    raise SettingsError(f"{shown}: {setting.answer}")


def translated(
    given: Mapping[str, Any], known: Collection[str], places: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Settings by our names, and where each was given. What neither is known nor of the table stays as it is.

    places: where each was given, for errors. Raises SettingsError, also where two names set the same.
    """
    found: dict[str, Any] = {name: value for name, value in given.items() if name in known}
    set_by = dict(places)
    for name, value in given.items():
        foreign = None if name in known else foreign_setting(name)
        if foreign is None:
            found[name] = value
            continue
        setting, off = foreign
        if off:
            value = not _on_or_off(value, places[name])
        for ours, our_value in our_settings(setting, value, places[name]).items():
            if ours in found:
                raise SettingsError(f"{places[name]} and {set_by[ours]} set the same: give one")
            found[ours], set_by[ours] = our_value, places[name]
    return found, set_by


def usual_word(name: str, value: Any) -> Any:
    """A setting's value under the word that is ours: half is float16, INFO is info."""
    if not isinstance(value, str) or name not in VALUES:
        return value
    return VALUES[name].get(value.lower(), value.lower())


def _on_or_off(value: Any, place: str) -> bool:
    text = str(value).lower()
    if text not in _TRUE + _FALSE:
        raise SettingsError(f"{place} is {value!r}; it must be true or false")
    return text in _TRUE
