"""Training: one loop with callbacks, shards, recordings and pretraining."""
