"""Commands of `vlmserve`: clients of the engine or of a served API."""
