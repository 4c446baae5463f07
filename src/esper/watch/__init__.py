"""A live view of runs, in the terminal and in the browser."""
