"""Evaluation: controllers and static networks on the same hosts, with statistics."""
