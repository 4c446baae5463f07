"""Tests of the live views of runs."""
