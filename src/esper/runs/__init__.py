"""A run is a folder: settings, event store, checkpoints and what was learned."""
