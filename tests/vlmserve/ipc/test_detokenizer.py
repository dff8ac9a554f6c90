"""What the detokenizer process makes of each kind of message."""

from __future__ import annotations

from tests.vlmserve.tiny_tokenizer import make_tokenizer
from vlmserve.frontend.detokenizer import DetokenizerManager
from vlmserve.frontend.detokenizer_process import handle
from vlmserve.ipc.messages import BatchTokenOutput, EncodeOutput, FinishReason, RequestsLost, TokenOutput
from vlmserve_common.checkpoint.text_tokenizer import TextTokenizer


def begun(*rids: str) -> DetokenizerManager:
    """One that has the first output of these requests."""
    manager = DetokenizerManager(TextTokenizer(make_tokenizer()))
    handle(manager, BatchTokenOutput(outputs=tuple(output(rid, first=True) for rid in rids)))
    assert manager.num_active == len(rids)
    return manager


def output(rid: str, *, first: bool = False, finish: FinishReason | None = None) -> TokenOutput:
    return TokenOutput(
        rid=rid,
        token_ids=(5,),
        finish_reason=finish,
        prompt_tokens=1,
        completion_tokens=1,
        cached_tokens=0,
        first=first,
    )


def test_requests_that_are_lost_are_forgotten_and_the_api_process_hears_of_them() -> None:
    manager = begun("a", "b", "c")
    lost = RequestsLost(rids=("a", "unknown", "c"), message="m")
    assert handle(manager, lost) == (lost, [])
    assert manager.num_active == 1
    texts, aborts = handle(manager, BatchTokenOutput(outputs=(output("a"), output("b"))))
    assert [text.rid for text in texts.outputs] == ["b"]
    assert aborts == []


def test_what_is_none_of_its_business_is_passed_on() -> None:
    message = EncodeOutput(rid="a", items=())
    assert handle(begun("a"), message) == (message, [])
