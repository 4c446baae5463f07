"""Analysis of a host: where it can grow and what lies there."""
