"""Computes the many inputs of one body: some at a time, so that other clients get their turns."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from dataclasses import replace

from vlmserve.api.served_model import ServedModel
from vlmserve.frontend.door import Visit
from vlmserve.frontend.requests import ChatPrompt, GenerateReqInput
from vlmserve.ipc.messages import TokenOutput
from vlmserve_common.errors import BadRequestError

LOT = 16
"""Inputs without media that go to the engine as one message. Media of several inputs are loaded at the same time, so
each of these inputs is a lot of its own."""
_LOTS = 16  # under way at the same time
_SHARE = 4  # one body takes at most a quarter of the server's room
_WAIT_S = 0.05


async def outputs_of(served: ServedModel, wanted: Sequence[GenerateReqInput]) -> list[TokenOutput]:
    """Return the output of each request, which comes as one. All are of the same weights, which change meanwhile only
    if generation is paused; then all is computed again.

    Once the first lot is in, a full server makes the others wait. Raises the error of one request, with its place.
    """
    while True:
        visit = Visit()
        found = await _outputs_of(served, wanted, visit)
        if visit.changes == served.manager.door.changes:
            return found


async def _outputs_of(served: ServedModel, wanted: Sequence[GenerateReqInput], visit: Visit) -> list[TokenOutput]:
    engine = served.settings.engine
    room = engine.max_running_requests + engine.max_queued_requests
    size = min(LOT, room)
    found: list[TokenOutput | None] = [None] * len(wanted)
    lots = deque(_lots(wanted, size))
    first = lots[0]

    async def work() -> None:
        while lots:
            lot = lots.popleft()
            requests = [wanted[at] for at in lot]
            # the name by which operators end it; each lot under way has its own
            requests[0] = replace(requests[0], request_id=f"{requests[0].request_id}{f'-{lot[0]}' if lot[0] else ''}")
            for at, output in zip(lot, await _whole(served, requests, visit, patient=lot is not first), strict=True):
                found[at] = output

    workers = [asyncio.ensure_future(work()) for _ in range(max(1, min(_LOTS, len(lots), room // (_SHARE * size))))]
    try:
        await asyncio.gather(*workers)
    finally:
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
        served.manager.door.end(visit)
    return [output for output in found if output is not None]


def _lots(wanted: Sequence[GenerateReqInput], size: int) -> Iterable[range]:
    start = 0
    while start < len(wanted):
        end = start + 1
        if not _may_have_media(wanted[start]):
            while end < len(wanted) and end - start < size and not _may_have_media(wanted[end]):
                end += 1
        yield range(start, end)
        start = end


def _may_have_media(request: GenerateReqInput) -> bool:
    prompt = request.prompt
    return isinstance(prompt, ChatPrompt) and not all(isinstance(one.get("content"), str) for one in prompt.messages)


async def _whole(
    served: ServedModel, requests: Sequence[GenerateReqInput], visit: Visit, *, patient: bool
) -> list[TokenOutput]:
    while True:
        found: dict[int, TokenOutput] = {}
        try:
            async with aclosing(served.manager.stream(*requests, visit=visit)) as batches:
                async for items in batches:
                    found |= {item.index: item.output for item in items}
            return [found[index] for index in range(len(requests))]
        except BadRequestError as error:
            if error.status != 429 or not patient:
                raise
        await asyncio.sleep(_WAIT_S)
