"""The published command line `python -m eval.benchmark ...` (also under torchrun): the same as `dloop bench ...`."""

import sys

from dloop.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry(["bench", *sys.argv[1:]]))
