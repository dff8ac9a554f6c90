"""Fetches the bytes of media that a request names."""
