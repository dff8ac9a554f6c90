"""Steps of different requests for the stages of a pipeline."""

from tests.vlmserve.scheduler.prompts import expected, request
from tests.vlmserve.scheduler.test_scheduler import Knobs, Rig


def test_decoding_requests_take_turns_in_as_many_groups_as_there_are_stages():
    """Nobody is in a step before the token of his last one is there, and no step waits for another one's tokens."""
    rig = Rig(Knobs(depth=4, stages=3, rows=6))
    messages = [request(f"r{i}", [3 + i, 5], new=12) for i in range(6)]
    for message in messages:
        rig.scheduler.handle(message)
    in_flight = []
    run_batch = rig.scheduler.run_batch

    def watched(batch):
        assert not {part.req for part in batch.decoding} & {part.req for one in in_flight for part in one.reqs}
        in_flight.append(batch)
        return run_batch(batch)

    process = rig.scheduler.process_batch_result

    def processed(batch, result):
        assert in_flight.pop(0) is batch
        process(batch, result)

    most = 0
    rig.scheduler.run_batch, rig.scheduler.process_batch_result = watched, processed
    while rig.scheduler.step():
        most = max(most, len(in_flight))
        rig.encode()
    assert [rig.tokens[message.rid] for message in messages] == [expected(message) for message in messages]
    decoding = [len(batch.req_pool_indices) for batch in rig.worker.batches if len(batch.prefix_slots) == 0]
    assert most == 3
    assert all((batch.input_ids >= 0).all() for batch in rig.worker.batches)
    assert set(decoding[3:-3]) == {2}
