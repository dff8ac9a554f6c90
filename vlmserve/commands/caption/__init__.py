"""`vlmserve caption`: captions for pictures and videos by the million."""
