"""Floor 2: the ViT towers. Imports `processors` and `vlmserve.common` only."""
