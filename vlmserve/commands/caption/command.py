"""The command line of `vlmserve caption`."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence

from vlmserve.commands.caption.arguments import CaptionCommand, read_command
from vlmserve.config.checks import SettingsError

OK, STOPPED, USAGE_ERROR, PARTIAL, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit statuses; by SIGTERM it is 143."""


def main(argv: Sequence[str]) -> int:
    """The exit status. Raises VlmserveError or OSError, with a message fit for the user, when nothing can be done."""
    try:
        return _run(read_command(argv))
    except SettingsError as error:
        for line in str(error).splitlines():
            print(f"vlmserve caption: error: {line}", file=sys.stderr)
        return USAGE_ERROR


def _run(command: CaptionCommand) -> int:
    from vlmserve.commands.batch.inputs.standard_input import StandardInput
    from vlmserve.commands.caption.session import Ended, caption
    from vlmserve_common.logs import configure_logging

    configure_logging(command.settings.log_level, "caption")
    stdin = StandardInput(0)
    try:
        ended = caption(command, io.BufferedReader(stdin), sys.stderr)
    finally:
        stdin.stop()
    print(ended.told)
    for trouble in ended.troubles:
        print(f"vlmserve caption: error: {trouble}", file=sys.stderr)
    return {
        Ended.FINISHED: PARTIAL if ended.tally.failed or ended.tally.failed_before else OK,
        Ended.STOPPED: STOPPED,
        Ended.INTERRUPTED: INTERRUPTED,
        Ended.TERMINATED: 143,
    }[ended.how]
