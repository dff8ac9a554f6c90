"""The HTTP API as our own commands use it: `vlmserve chat`, `demo`, `caption`, `warmup` and `bench`."""
