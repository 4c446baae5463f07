"""`python -m esper.cli`."""

import sys

from esper.cli import main

sys.exit(main())
