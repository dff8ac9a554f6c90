"""Checkpoints that we make ourselves, for tests and measurements."""
