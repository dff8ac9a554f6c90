"""`vlmserve watch`: a camera or a file, and what the model says about it."""
