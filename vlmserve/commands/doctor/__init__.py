"""`vlmserve doctor`: what this machine and installation have, and lack. Works without any dependency being there."""
