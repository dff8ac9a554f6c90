"""Inputs and progress of commands over many files: `vlmserve caption` and `vlmserve warmup`."""
