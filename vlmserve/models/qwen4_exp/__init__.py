"""Qwen4Exp (published first as Qwen3.8-Flash-Next): Qwen3.5's delta nets and experts, with several residual streams,
n-gram embedding tables, and attention to a budget of tokens that an index chooses."""
