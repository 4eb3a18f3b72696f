"""The published entry point of data preparation: `scripts/prepare_data.py --dataset perfectblend`.

Forwards to `dloop data prepare`; writes ./cache/dataset/perfectblend_train.jsonl.
"""

import sys

from dloop.cli.main import entry

if __name__ == "__main__":
    sys.exit(entry(["data", "prepare", *sys.argv[1:]]))
