"""Devices, memory and the small computations that towers and decoders share."""
