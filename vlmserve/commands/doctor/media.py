"""Whether pictures and videos can be read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from vlmserve.commands.doctor.finding import Finding, Probed, Status
from vlmserve.commands.doctor.packages import pip_install

_PICTURES = ("PNG", "JPEG", "WEBP", "AVIF")
_OPTIONAL = ("AVIF",)  # Pillow may be built without it
_SAMPLES = {"shapes.png": "sample picture", "rolling.mp4": "sample video"}

PROBES = (*(f"picture:{kind}" for kind in _PICTURES), *(f"sample:{name}" for name in _SAMPLES))


def media_findings(probed: Mapping[str, Probed]) -> Iterator[Finding]:
    """Yield the findings of probes by the names of PROBES."""
    readable = [kind for kind in _PICTURES if probed[f"picture:{kind}"].error is None]
    if readable:
        yield Finding("pictures", f"{', '.join(readable)} can be read", data={"formats": readable})
    for kind in _PICTURES:
        found = probed[f"picture:{kind}"]
        if found.error is not None:
            yield _unread(kind, found, "pillow", optional=kind in _OPTIONAL)
    for sample, name in _SAMPLES.items():
        found = probed[f"sample:{sample}"]
        if found.error is not None:
            yield _unread(name, found, "av" if sample.endswith(".mp4") else "pillow")
        else:
            yield Finding(name, f"{sample} is read as it should be", data=found.result or {})


def _unread(name: str, found: Probed, package: str, *, optional: bool = False) -> Finding:
    if found.lacks_module:
        return Finding(name, f"not tried: {found.error}", Status.NOTE)
    status = Status.NOTE if optional else Status.PROBLEM
    remedy = pip_install("--force-reinstall", package)
    return Finding(name, f"cannot be read: {found.error}", status, remedy)
