"""Continuous batching: which tokens are computed next, for whom, in which slots.

Read the files in this order:

1. `req`: a request, its lengths and its tokens; `req_life`: its status, its times and the logprobs of its prompt;
   `req_media`: its pictures and videos, and the order in which they are encoded.
2. `intake`: requests made of messages, with the work that begins at once.
3. `waiting_queue`: the requests that wait, clients in turns; `policy`: the order within a client, and preemption.
4. `kv_cache_manager`: who owns which KV slots; `request_states`: who owns which state of recurrent layers.
5. `prefill_adder`: the budgets of a step; `estimates`: what these budgets are based on.
6. `admission`: which prompts get a chunk of the next step; `drafts`: which tokens are guessed.
7. `schedule_batch`: one step, and the message that workers get of it; `sampling_info`: how its tokens are sampled.
8. `outputs`: the results of a step, request by request; `meter`: figures and the log.
9. `scheduler`: decides steps and keeps account, with all of the above. `vlmserve.engine.loop` is the loop around it.

`grammar/` compiles the grammars that answers follow.
"""
