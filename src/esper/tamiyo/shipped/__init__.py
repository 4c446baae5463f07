"""The controller that comes with the package: its weights, and what they are."""
