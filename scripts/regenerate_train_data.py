"""The published entry point of regeneration: `scripts/regenerate_train_data.py --server-address localhost:30000 ...`.

Forwards to `dloop data regenerate`.
"""

import sys

from dloop.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry(["data", "regenerate", *sys.argv[1:]]))
