"""`vlmserve warmup`: pictures and videos are encoded ahead of time, for servers to start warm."""
