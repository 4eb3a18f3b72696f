"""The published entry point of training for EAGLE-3: `torchrun ... scripts/train_eagle3.py FLAGS`.

Takes the published flags with their published defaults and forwards to `dloop train`.
"""

import sys

from dloop.cli.eagle3_script import forwarded
from dloop.cli.main import entry, fail, one_line
from dloop.errors import UserError

PROG = "train_eagle3.py"


def main(words: list[str]) -> int:
    try:
        return entry(["train", *forwarded(PROG, words)])
    except SystemExit:  # argparse has printed the help
        return 0
    except UserError as error:
        return fail(f"{PROG}: error: {one_line(error)}", 2, words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
