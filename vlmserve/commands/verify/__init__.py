"""`vlmserve verify`: our answers beside those of `transformers`, on the user's machine and checkpoint."""
