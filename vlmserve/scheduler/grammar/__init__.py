"""Structured output: what is asked of an answer's form, compiled, and which tokens may come next."""
