"""Videos: which frames are taken, and how they are decoded."""
