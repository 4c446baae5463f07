"""Real tasks that need no network: data, and what is to be learnt from it."""
