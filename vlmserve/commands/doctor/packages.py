"""The packages that vlmserve needs and can use, beside the installed ones."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve_common.installing import NAME, ROOT, checkout_project, install, pip_install

_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:\[[^\]]*\])?\s*([^;]*)")
_EXTRA = re.compile(r"extra\s*==\s*['\"]([\w-]+)['\"]")
_MODULES = {"pillow": "PIL", "pyyaml": "yaml", "pyzmq": "zmq"}
# Extras for the development of vlmserve.
_EXTRAS_LEFT_OUT = ("dev",)
# Packages whose import needs packages that we do without.
_NOT_IMPORTED = ("qwen-vl-utils",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A requirement. text: as pip takes it. bounds: of its version, "" for any. installed: its version, if any."""

    text: str
    name: str
    bounds: str
    installed: str | None

    @property
    def module(self) -> str | None:
        """The module whose import shows that the package works; None if no import does."""
        name = self.name.lower()
        return None if name in _NOT_IMPORTED else _MODULES.get(name, name.replace("-", "_"))

    @property
    def lacks(self) -> str | None:
        """The fault of the package that shows without importing it; None if there is none."""
        if self.installed is None:
            return f"is not installed, and {self.bounds or 'any version'} is needed"
        if _outside(self.installed, self.bounds):
            return f"{self.installed} is installed, and {self.bounds} is needed"
        return None


def read_requirements(folder: Path = ROOT) -> tuple[list[Requirement], dict[str, list[Requirement]]]:
    """Return the requirements of vlmserve, and those of each extra, from a checkout or else from the installed package.

    The installed metadata of a checkout may be old: they are those of the day when it was installed.
    """
    project = checkout_project(folder)
    if project is not None:
        needed, extras = project["dependencies"], project["optional-dependencies"]
    else:
        needed, extras = [], {}
        for line in importlib.metadata.requires(NAME) or ():
            found = _EXTRA.search(line)
            (needed if found is None else extras.setdefault(found.group(1), [])).append(line)
    extras = {extra: lines for extra, lines in extras.items() if extra not in _EXTRAS_LEFT_OUT}
    return list(map(_requirement, needed)), {extra: list(map(_requirement, lines)) for extra, lines in extras.items()}


def needed_findings(needed: Sequence[Requirement], imports: Mapping[str, Probed]) -> Iterator[Finding]:
    """Yield a finding for each package that is always needed. imports: the probe of each module."""
    for requirement in needed:
        error = None
        if requirement.installed is not None and requirement.module is not None:
            error = imports[requirement.module].error
        broken = error and f"{requirement.installed} is installed, and cannot be imported: {error}"
        lacks = requirement.lacks or broken
        data = {"installed": requirement.installed, "needed": requirement.bounds, "import_error": error}
        if not lacks:
            text = f"{requirement.installed} ({requirement.bounds or 'any version'})"
            yield Finding(requirement.name, text, data=data)
            continue
        again = ["--force-reinstall"] if broken else []
        # one command for all that are missing
        remedy = install() if requirement.installed is None else pip_install(*again, requirement.text)
        yield Finding(requirement.name, lacks, Status.PROBLEM, remedy, data)


def extra_findings(extras: Mapping[str, Sequence[Requirement]]) -> Iterator[Finding]:
    """Yield a finding for each extra."""
    for extra, requirements in extras.items():
        lacking = "; ".join(f"{one.name} {one.lacks}" for one in requirements if one.lacks)
        data = {one.name: one.installed for one in requirements}
        if lacking:
            yield Finding(extra, lacking, Status.NOTE, install(extra), data)
        else:
            yield Finding(extra, ", ".join(f"{name} {version}" for name, version in data.items()), data=data)


def _requirement(line: str) -> Requirement:
    found = _REQUIREMENT.match(line)
    assert found is not None, line
    name, bounds = found.group(1), found.group(2).strip()
    try:
        installed = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        installed = None
    return Requirement(text=line.partition(";")[0].strip(), name=name, bounds=bounds, installed=installed)


def _outside(version: str, bounds: str) -> bool:
    """Return True if a version is outside of the bounds; False also if `packaging` is not there to tell."""
    try:
        from packaging.specifiers import SpecifierSet
    except ImportError:
        return False
    return not SpecifierSet(bounds).contains(version, prereleases=True)
