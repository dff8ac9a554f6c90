"""Weights that change while the engine serves, and memory that it gives back for a while."""
