"""One question per file; `python -m benchmarks NAME` runs them."""
