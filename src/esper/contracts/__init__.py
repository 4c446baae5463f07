"""Types, tables and protocols that all packages share."""
