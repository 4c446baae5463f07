"""`python -m research NAME`: one study; its tables are in the pages of `docs`."""

import sys

from benchmarks.__main__ import main

if __name__ == "__main__":
    sys.exit(main(package="research"))
