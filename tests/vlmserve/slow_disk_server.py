"""A whole server with a slow disk: `python -m tests.vlmserve.slow_disk_server MODEL_FOLDER CACHE_DIR [ENCODERS]`.

Each embedding's write waits for a byte from the pipe $GO. It says "finishing" when the scheduler is told to end.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from vision.cache.store import EmbeddingStore
from vlmserve.api.launch import launch_server
from vlmserve.config.engine_args import EngineArgs, StartSettings
from vlmserve.config.settings import load_settings
from vlmserve.engine import process
from vlmserve.ipc.channels import Channels
from vlmserve.ipc.child import Ready


def slow_scheduler(args: EngineArgs, channels: Channels, start: StartSettings, ready: Ready) -> None:
    put = EmbeddingStore.put

    def slow_put(*words: object, **options: object) -> bool:
        go = os.open(os.environ["GO"], os.O_RDONLY)
        os.read(go, 1)
        os.close(go)
        return put(*words, **options)

    def say_when_told(*, before_end: Callable[[], None], **facts: int | None) -> None:
        ready(
            **facts,
            before_end=lambda: (print("finishing", file=sys.stderr, flush=True), before_end()),
        )

    EmbeddingStore.put = slow_put
    process.FINISH_S = float(os.environ.get("FINISH_S", process.FINISH_S))
    process.run_scheduler(args, channels, start, say_when_told)


if __name__ == "__main__":
    model, cache, *flags = sys.argv[1:]
    settings = {"model": model, "embedding_cache_dir": cache, "port": 0, "num_threads": 1, "max_total_tokens": 4096}
    more = {} if not flags else {"encoder_dp_size": flags[0]}
    sys.exit(launch_server(load_settings(settings | more), scheduler=slow_scheduler))
