"""Every kernel in the variants that users meet, and the resources they need when compiled for a GPU, also without
one."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from vlmserve_common.kernels.gpu.common import Variant

MODULES = (
    "activation",
    "attention_variants",
    "experts",
    "fp8",
    "norm",
    "page_table",
    "positions",
    "routing",
    "sampling",
)
"""Modules of this package that have a CATALOGUE of variants."""
_CUOBJDUMP = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


@dataclass(frozen=True, kw_only=True)
class Resources:
    """Resources of a compiled variant: registers and bytes of spilled local memory of a thread, bytes of shared memory
    of a block. tensor_cores: the widest instruction it multiplies by: "wgmma", "mma" or "". async_copies:
    whether it has loads that a pipeline overlaps with work."""

    name: str
    registers: int
    spilled: int
    shared: int
    tensor_cores: str
    async_copies: bool


def catalogue() -> tuple[Variant, ...]:
    """All variants of all modules."""
    modules = (import_module(f"{__package__}.{name}") for name in MODULES)
    return tuple(variant for module in modules for variant in module.CATALOGUE)


def compiled(variant: Variant, capability: int = 90) -> Resources:
    """Compile a variant; not under Triton's interpreter. Whatever the compiler raises."""
    names = variant.kernel.arg_names
    signature, attributes = {}, {}
    for index, name in enumerate(names):
        kind, _, multiple = variant.signature.get(name, "constexpr").partition(":")
        signature[name] = kind
        if multiple:
            attributes[(index,)] = [["tt.divisibility", int(multiple)]]
    source = ASTSource(variant.kernel, signature, dict(variant.constexprs), attributes)
    options = {name: getattr(variant, name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(found.asm["cubin"])
        file.flush()
        usage = subprocess.run([_CUOBJDUMP, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    ptx = found.asm["ptx"]
    return Resources(
        name=variant.name,
        registers=numbers["REG"],
        spilled=numbers["STACK"] + numbers["LOCAL"],
        shared=found.metadata.shared,
        tensor_cores="wgmma" if "wgmma.mma_async" in ptx else "mma" if "mma.sync" in ptx else "",
        async_copies="cp.async" in ptx,
    )


def main(names: Iterable[str]) -> None:
    """Print the resources of variants whose names begin so, one a line as JSON."""
    wanted = tuple(names) or ("",)
    for variant in catalogue():
        if variant.name.startswith(wanted):
            print(json.dumps(asdict(compiled(variant))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
