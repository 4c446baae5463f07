"""The controller: what she sees, what she may do, how she decides."""
