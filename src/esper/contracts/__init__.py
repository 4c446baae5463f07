"""The shared vocabulary: types, tables and protocols of all packages, without logic."""
