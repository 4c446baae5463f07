"""What is fast, what is promised, and what growing brings: one question per module."""

import os

# Before torch and numpy are imported: libraries start their threads then.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
