"""Studies behind the published results: one question per module."""
