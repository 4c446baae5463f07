"""The worlds in which a controller lives and learns."""
