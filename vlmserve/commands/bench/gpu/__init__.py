"""`vlmserve bench gpu`: the engine on one GPU, offline, against what the device can and beside transformers."""
