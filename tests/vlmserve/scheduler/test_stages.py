"""Steps of different requests for the stages of a pipeline."""

from tests.vlmserve.scheduler.prompts import request
from tests.vlmserve.scheduler.rig import Knobs, Rig


def test_decoding_requests_take_turns_in_as_many_groups_as_there_are_stages():
    """Nobody is in a step before the token of his last one is there, and no step waits for another one's tokens."""
    rig = Rig(Knobs(depth=4, stages=3, rows=6))
    messages = [request(f"r{i}", [3 + i, 5], new=12) for i in range(6)]
    rig.handle(*messages)
    scheduler, most = rig.scheduler, 0
    decide = scheduler.get_next_batch_to_run

    def watched(in_flight, **options):
        nonlocal most
        most = max(most, len(in_flight))
        batch = decide(in_flight, **options)
        for part in () if batch is None else batch.decoding:
            assert not any(part.req is other.req for one in in_flight for other in one.reqs)
        return batch

    scheduler.get_next_batch_to_run = watched
    rig.run()
    rig.check_answers(*messages)
    decoding = [len(batch.req_pool_indices) for batch in rig.worker.batches if len(batch.prefix_slots) == 0]
    assert most == 3
    assert all((batch.input_ids >= 0).all() for batch in rig.worker.batches)
    assert set(decoding[3:-3]) == {2}
