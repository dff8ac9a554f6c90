"""Processes that compute together: meeting, connecting and exchanging."""
