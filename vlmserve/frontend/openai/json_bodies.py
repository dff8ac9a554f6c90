"""JSON of requests and answers: parsed, checked by a model, and written."""

from __future__ import annotations

from typing import Any, TypeVar

import pydantic_core
from pydantic import BaseModel, ValidationError

from vlmserve.config.plain_problems import did_you_mean, sentence, shortened
from vlmserve.frontend.openai.protocol import FIELDS_INSIDE
from vlmserve_common.errors import BadRequestError

_Model = TypeVar("_Model", bound=BaseModel)


def json_object(text: bytes | bytearray, what: str) -> dict[str, Any]:
    """Parse a JSON object. what: its name in errors. Raises BadRequestError."""
    if not text or text.isspace():
        raise BadRequestError(f"the {what} is empty; it must be a JSON object", code="invalid_json")
    try:
        raw = pydantic_core.from_json(text, allow_inf_nan=False, cache_strings=False)
    except ValueError as error:
        why = str(error).replace("EOF while parsing", "it ends within")
        raise BadRequestError(f"the {what} is not valid JSON: {why}", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise BadRequestError(f"the {what} must be a JSON object", code="invalid_json")
    return raw


def checked(raw: dict[str, Any], model: type[_Model]) -> _Model:
    """Return an object as a model. Raises BadRequestError."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        raise _refusal(error, raw, model) from None


def invalid_value(param: str, what: str) -> BadRequestError:
    """Return the error of a field whose value is not allowed."""
    return BadRequestError(what, param=param, code="invalid_value")


def _refusal(error: ValidationError, raw: Any, model: type[BaseModel]) -> BadRequestError:
    """Return the error for the first problem of a request body, with the path of its field as the client wrote it."""
    problem = error.errors(include_url=False)[0]  # of a few: see `StrictModel`
    path = _path_in(raw, problem["loc"], absent=problem["type"] == "missing")
    known = model.model_fields if len(problem["loc"]) == 1 else FIELDS_INSIDE
    guess = did_you_mean(path.rpartition(".")[2], known)
    message = sentence(problem, path or "the request body", guess)
    return BadRequestError(message, param=path or None, code="invalid_value")


def json_text(data: Any) -> bytes:
    """Return JSON as events have it: short, in UTF-8. Python's own encoder takes several times as long, which shows in
    answers with logprobs."""
    return pydantic_core.to_json(data)


def sse_event(data: Any) -> bytes:
    """Return one event with a JSON payload."""
    return b"data: " + json_text(data) + b"\n\n"


def _path_in(raw: Any, loc: tuple[int | str, ...], *, absent: bool) -> str:
    """Return a pydantic location as a path like messages[0].content[1].text, without the tags of unions.

    absent: the last step of the location is a missing field.
    """
    path, value = "", raw
    for place, step in enumerate(loc):
        missing = absent and place == len(loc) - 1
        if (
            isinstance(value, dict)
            and value.get("type") == step
            and loc[place + 1 : place + 2] in [(k,) for k in value]
        ):
            continue  # a tag that is the name of a field, too: {"type": "video", "video": ...}
        if isinstance(step, int) and isinstance(value, list) and step < len(value):
            path, value = f"{path}[{step}]", value[step]
        elif isinstance(step, str) and isinstance(value, dict) and (step in value or missing):
            name, value = shortened(step), value.get(step)
            path = f"{path}.{name}" if path else name
    return path
