"""One medium's way: it leaves once, whoever calls it off when."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from processors.fetch.fetching import FetchSettings, MediaFetcher
from processors.pool.job import Job
from vlmserve_common.errors import BadRequestError


class Queue:
    """An executor whose threads never come. meanwhile: what another thread does while something is being queued."""

    def __init__(self, meanwhile=lambda: None):
        self.futures = []
        self.meanwhile = meanwhile

    def submit(self, step, *args):
        self.futures.append(Future())
        self.meanwhile()
        return self.futures[-1]


@pytest.fixture
def left():
    return []


@pytest.fixture
def job(left):
    return Job("here", MediaFetcher(FetchSettings()), left.append)


def step():
    pytest.fail("there is no thread")


def test_where_it_waits_it_is_taken_away_at_once(job, left):
    queue = Queue()
    job.submit(queue, step)
    assert not left
    job.call_off()
    job.call_off()
    assert job.called_off
    assert queue.futures[0].cancelled()
    assert left == [job]


def test_in_a_thread_s_hands_it_leaves_by_them(job, left):
    queue = Queue()
    job.submit(queue, step)
    queue.futures[0].set_running_or_notify_cancel()
    job.call_off()
    assert job.called_off
    assert not left
    job.refuse(ValueError())
    assert not left
    job.give("made")
    job.fail(ValueError())
    assert left == [job]


def test_it_is_taken_away_though_it_was_called_off_just_before_it_waited(job, left):
    queue = Queue(meanwhile=job.call_off)
    job.submit(queue, step)
    assert queue.futures[0].cancelled()
    assert left == [job]


def test_likewise_elsewhere(job, left):
    job.call_off()
    assert not left
    job.wait_for(lambda: True)
    assert left == [job]


def test_who_has_left_waits_nowhere(job, left):
    job.give("made")
    job.wait_for(lambda: pytest.fail("it does not wait there"))
    job.call_off()
    assert job.answer.result() == "made"
    assert left == [job]


def test_it_leaves_before_it_is_answered(job, left):
    job.answer.add_done_callback(lambda _: left.append("answered"))
    job.give("made")
    assert left == [job, "answered"]


def test_refusing_fails_what_waits(job, left):
    job.submit(Queue(), step)
    job.refuse(BadRequestError("no more"))
    error = job.answer.exception()
    assert (error.message, error.param) == ("no more", "here")
    assert left == [job]


def test_calling_it_off_breaks_off_its_fetching(job):
    job.call_off()
    with pytest.raises(BadRequestError, match="shutting down"):
        job.fetcher.fetch("http://127.0.0.1:1/")
