"""The HTTP API as our own clients use it: `vlmserve demo`, `vlmserve chat`."""
