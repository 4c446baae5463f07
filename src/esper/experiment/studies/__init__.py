"""Questions that take many trainings: what is learnt, and what growing is worth."""
