"""The version of vlmserve."""

__version__ = "0.1.0"
