"""Lets `transformers` import beside a torch that torchvision's compiled part was not built for."""

from __future__ import annotations

import functools
import importlib.util
import sys
import warnings


@functools.cache
def make_torchvision_importable() -> object:
    """Make torchvision importable; call this before `transformers` imports a model or processor. Does nothing if
    torchvision is missing or works.

    transformers imports torchvision if it is installed. Its compiled part may belong to another build of torch. At
    import it then lacks two operators, which nothing here calls. Returns (and the cache so keeps alive) the library
    that declares them.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Failed to load image Python extension")
        try:
            import torchvision  # noqa: F401

            return None
        except RuntimeError:  # operator torchvision::nms does not exist
            return _import_with_operators()


def _import_with_operators() -> object:
    import torch

    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    library = torch.library.Library("torchvision", "DEF")
    for operator in ("nms", "qnms"):
        library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    import torchvision  # noqa: F401

    return library
