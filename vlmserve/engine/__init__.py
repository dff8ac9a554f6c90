"""Builds the engine of one process from its settings."""
