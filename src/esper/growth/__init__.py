"""Seeds and slots: what a network grows with. Nothing here decides."""
