"""Errors that are the user's to mend."""

from pathlib import Path


class UserError(ValueError):
    """An error of the user's input: shown as one line, exit 2."""


def refuse_folder(path: Path, flag: str) -> None:
    """Raises UserError where a folder stands under the name of a file to write: before the work, not after it."""
    if path.is_dir():
        raise UserError(f"{path} is a folder, where a file is to be written; move it away, or give another {flag}")


def refuse_output(path: Path | None, flag: str) -> None:
    """Raises UserError where no file can be written under this name: before the work, not after it."""
    if path is None:
        return
    refuse_folder(path, flag)
    if not path.absolute().parent.is_dir():
        what = f"{path.parent} is no folder; make it first"
        raise UserError(f"{flag} {path} must be a file in a folder that is there: {what}")
