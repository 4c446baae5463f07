"""The shell: collects, trains, measures and tells; everything below is quiet."""
