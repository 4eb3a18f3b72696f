"""By what a training state knows its target: a hash that takes no time, as this and as earlier versions make it."""

import hashlib
import json
from pathlib import Path
from typing import cast

from dloop.checkpoint import weight_files

PIECE, PIECES = 2**15, 8  # bytes of a sampled piece, and about how many a large tensor gives
METADATA = "__metadata__"  # an entry of a safetensors header that is no tensor


def sampled_sha256(folder: Path) -> str:
    """One hash over the config and, of all weight files in name order, the headers and pieces of every tensor: at once
    where all of them take minutes.

    Small tensors are read whole; of large ones another training moves values in every piece.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        with file.open("rb") as handle:
            header = handle.read(int.from_bytes(handle.read(8), "little"))
            digest.update(header)
            stored, data = cast(dict[str, dict[str, list[int]]], json.loads(header)), handle.tell()
            for start, stop in sorted(about["data_offsets"] for name, about in stored.items() if name != METADATA):
                for place in range(start, stop, max(PIECE, (stop - start) // PIECES)):
                    handle.seek(data + place)
                    digest.update(handle.read(min(PIECE, stop - place)))
    return digest.hexdigest()


def sampled_by_file(folder: Path) -> str:
    """What `sampled_sha256` was at first, and states of that time hold: 64 pieces of a file, wherever they lie."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for file in weight_files(folder):
        size = file.stat().st_size
        digest.update(str(size).encode())
        with file.open("rb") as handle:
            for place in range(0, size, max(2**16, size // 64)):
                handle.seek(place)
                digest.update(handle.read(2**16))
    return digest.hexdigest()
