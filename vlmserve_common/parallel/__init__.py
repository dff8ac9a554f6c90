"""Processes that compute together: how they meet, and what they exchange."""
