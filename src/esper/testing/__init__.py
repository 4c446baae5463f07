"""A simulated world for tests and quick checks of the learner."""
