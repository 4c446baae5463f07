"""One question per file; `esper bench NAME` runs them."""
