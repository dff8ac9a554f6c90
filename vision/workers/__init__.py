"""Encodes batches, in this process or in worker processes."""
