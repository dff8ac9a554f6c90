"""Prompts computed by one server and answers by another: the hand-over of KV between them.

A decode server orders a prompt's KV from a prefill server, in a *room*: prompt and room go there, and slots come back
as chunks are computed. Each rank has a `KVAgent`. The agents of the decode server read from those of the prefill server
whatever heads and layers they need, straight into slots that are theirs already. The prefill server keeps its slots
until the room is released, or its lease is over.

`messages` has the protocol, `links` how messages are sealed and sent, `pools` what an agent reads and writes,
`transport` how that moves (`tcp`, `nixl`), `prefill` and `decode` the two managers, each with a thread of its own
beside the scheduler.
"""
