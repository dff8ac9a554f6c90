"""Processes, and how they end."""
