"""Sounds: files to samples, samples to log-mel features."""
