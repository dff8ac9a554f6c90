"""Structured output: grammars are compiled, and say which tokens may come next."""
