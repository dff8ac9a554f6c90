"""Floor 1: media in, pad tokens and M-RoPE positions out. Imports nothing in-house but `vlmserve_common`."""
