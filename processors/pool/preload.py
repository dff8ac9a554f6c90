"""Imported once, by the process that children are forks of. It loads torch and the code that resizes pictures, in one
thread."""

from __future__ import annotations

import gc
import os


def _load() -> None:
    gc.disable()  # imports make hundreds of thousands of objects, which all stay
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # before the libraries start threads, which a fork would not have
    import numpy as np
    import torch
    from PIL import Image

    import processors.families.registry
    import processors.pool.media_worker  # noqa: F401
    from processors.resize import resize_frames

    torch.set_num_threads(1)
    Image.init()  # its plugins
    resize_frames(np.zeros((1, 8, 8, 3), np.uint8), 4, 4, "bicubic")
    gc.collect()
    gc.freeze()  # collecting would write to, and so copy, the pages of all objects
    gc.enable()


_load()
