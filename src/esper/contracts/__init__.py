"""The shared vocabulary: what every other package may speak of, and no logic."""
