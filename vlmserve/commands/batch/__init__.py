"""What commands over many files share: their inputs, and the display of how far a run is."""
