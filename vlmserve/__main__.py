"""The beginning of the `vlmserve` command: of `python -m vlmserve`, and of the installed script."""

from __future__ import annotations

import signal
import sys


def main() -> int:
    """Run the command; return the exit status."""
    # Ctrl-C while modules are imported ends the process at once and without a word, for there is nothing to undo yet.
    # A server keeps that until it has something to undo, and then handles the signal itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from vlmserve import cli

    if sys.argv[1:2] != ["serve"]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
