"""Errors that name the wrong value; the server turns them into OpenAI error bodies."""

from __future__ import annotations


class VlmserveError(Exception):
    """Base of all errors raised on purpose."""


class BadRequestError(VlmserveError):
    """The request is at fault: answered with `status` (4xx) and OpenAI's error body.

    `message` names the wrong value, the limit and the setting that changes it; `param` is the request field
    (e.g. "messages[0].content[1]"); `code` a short machine-readable word (e.g. "context_length_exceeded"). Its text
    is the message, after the place in the messages if the message does not name it.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None, status: int = 400) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code
        self.status = status

    def __str__(self) -> str:
        place = self.param or ""
        return f"{place}: {self.message}" if "[" in place and place not in self.message else self.message


class CheckpointError(VlmserveError):
    """A checkpoint folder is unusable: a missing, extra or misshaped tensor, an unknown family, a broken file."""


class SettingsError(VlmserveError):
    """One or more settings are wrong. The message has one line for each, with the setting, its value and the allowed
    values."""


class EngineError(VlmserveError):
    """The engine failed on its own account (a worker died, an invariant broke); answered with 5xx."""


class EngineUnavailableError(EngineError):
    """The engine is gone; the status is 503."""


class DeviceLostError(EngineError):
    """A GPU reported an error after which it computes nothing more for this process, which has to end."""


class RankLostError(DeviceLostError):
    """Another process that has a part of the model is gone, or did not answer in time."""


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message."""
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else "no reason given"
