"""`vlmserve plan`: whether a model fits on GPUs, and how fast it can be at the best, from its config.json alone."""
