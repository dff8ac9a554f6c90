"""The ground floor: what all three floors share. Imports nothing in-house."""
