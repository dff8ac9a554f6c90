"""The version of vlmserve: that of the git tag, as it was when the package was built or installed."""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("vlmserve")
except PackageNotFoundError:  # a checkout that was never installed
    __version__ = "0+unknown"
