"""`vlmserve warmup`: encodes pictures and videos ahead of time, so that servers start warm."""
