"""Which attention a GPU gets, and what keeps it from a faster one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from vlmserve.commands.doctor.finding import Finding, Status
from vlmserve.commands.doctor.probing import Probed


def attention_findings(probed: Probed) -> Iterator[Finding]:
    """probed: by `attention_probe.examine`; what fails to be imported is told elsewhere."""
    facts = probed.result
    if facts is None:
        if not probed.lacks_module:
            yield Finding(name="attention", text=f"its trial failed: {probed.error}", status=Status.PROBLEM)
        return
    if facts["device"] is None:
        text = "on the CPU: our own operators where the CPU has them, else torch's"
        yield Finding(name="attention", text=text, data=facts)
        return
    yield _compiler(facts["compiler"])
    for name, why_not in facts["why_not"].items():
        version = facts["versions"][name]
        yield Finding(
            name=name,
            text=f"{version or 'not installed'}: {'its trial passes' if why_not is None else why_not}",
            status=Status.OK if why_not is None else Status.NOTE,
            data={"version": version, "why_not": why_not},
        )
    yield _attention(facts)


def _compiler(path: str | None) -> Finding:
    if path is not None:
        return Finding(name="C compiler", text=f"{path}, which Triton's kernels need", data={"path": path})
    return Finding(
        name="C compiler",
        text="there is none, and Triton's kernels need one at every first start",
        status=Status.NOTE,
        remedy="apt-get install gcc, or set CC",
        data={"path": None},
    )


def _attention(facts: dict[str, Any]) -> Finding:
    backend, slow = facts["backend"], facts["backend"] == "torch"
    text = f"{backend}, by --attention-backend auto, tried with {facts['heads']}"
    return Finding(
        name="attention",
        text=text + ("; it is slow on a GPU" if slow else ""),
        status=Status.NOTE if slow else Status.OK,
        data=facts,
    )
