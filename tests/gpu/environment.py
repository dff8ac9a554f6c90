"""What a machine has that its results depend on: `python -m tests.gpu.environment`. It needs torch only."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib import metadata

import torch

PACKAGES = ("torch", "triton", "transformers", "flashinfer-python", "numpy", "safetensors", "tokenizers", "torchvision")
PACKAGES += ("pytest", "hypothesis", "av", "fastapi", "msgspec", "pyzmq", "blake3", "xgrammar")


def main() -> None:
    """Prints a line each."""
    print(f"python {platform.python_version()} on {platform.platform()}, {os.cpu_count()} CPU cores")
    for name in PACKAGES:
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            print(f"{name}: not installed")
    for tool in ("gcc", "g++", "nvcc"):
        print(f"{tool}: {shutil.which(tool) or 'not found'}")
    if shutil.which("nvidia-smi"):
        fields = "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,temperature.gpu,power.draw"
        command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv"]
        print(subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip())
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        print(f"CUDA {torch.version.cuda}: {properties}")
    else:
        print(f"torch {torch.__version__} finds no CUDA device")


if __name__ == "__main__":
    main()
