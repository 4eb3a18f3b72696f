"""`python -m dloop` is `dloop`."""

import sys

from dloop.cli.main import entry

sys.exit(entry())
