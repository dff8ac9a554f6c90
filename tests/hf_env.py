"""Import this before `transformers` in a test that compares with it: `from tests import hf_env  # noqa: F401`.

Makes torchvision, which transformers' image processors and qwen_vl_utils want, importable beside a CPU build of torch.
Besides: no hub access, and one thread (the matrices are tiny, more threads only wait for each other).
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from vlmserve_common.compute.torchvision_shim import make_torchvision_importable

torch.set_num_threads(1)
make_torchvision_importable()
