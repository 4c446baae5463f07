"""Bytes on disk: files that are whole or not there, locks, tables."""
