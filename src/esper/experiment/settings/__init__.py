"""How settings are written, checked, layered and parsed."""
