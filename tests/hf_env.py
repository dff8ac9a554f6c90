"""Import this before `transformers` in a test that compares with it: `from tests import hf_env  # noqa: F401`.

transformers' image and video processors (and qwen_vl_utils) import torchvision, whose compiled part does not load
beside a CPU build of torch. Their resizing is plain torch, so declaring the two operators that torchvision looks up at
import is enough. Besides: no hub access, and one thread (the matrices are tiny, more threads only wait for each other).
"""

from __future__ import annotations

import os
import sys
import warnings

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

torch.set_num_threads(1)


def _declare_torchvision_operators() -> torch.library.Library:
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return library


_library = None  # dropping a Library undeclares its operators
with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="Failed to load image Python extension")
    try:
        import torchvision
    except RuntimeError:  # "operator torchvision::nms does not exist"
        for module in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[module]
        _library = _declare_torchvision_operators()
        import torchvision  # noqa: F401
