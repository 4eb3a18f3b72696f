"""Shapes and types are checked at run time in all tests: the hook must be installed before dloop is imported."""

import functools
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jaxtyping

assert "dloop" not in sys.modules, "dloop was imported before the checking import hook"
PACKAGE = Path(__file__).parents[1] / "dloop"
CHECKED = [f"dloop.{path.stem}" for path in sorted(PACKAGE.iterdir()) if path.stem != "kernels"]  # Triton reads source
jaxtyping.install_import_hook(CHECKED, "beartype.beartype(conf=beartype.BeartypeConf(is_pep484_tower=True))")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run as Python; read when they are imported
ROOT = Path(__file__).parents[1]
GOLDENS_VARIABLE = "DLOOP_GOLDENS"

torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "2")))
hypothesis.settings.register_profile("dloop", deadline=None, derandomize=True, database=None)
hypothesis.settings.load_profile("dloop")


def pytest_configure(config: pytest.Config) -> None:
    """Silence hypothesis about records made inside strategies: beartype picks the list item to check at random."""
    config.addinivalue_line("filterwarnings", "ignore:Do not use the .random. module inside strategies")
    if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton"):
        search_once()


def search_once() -> None:
    """Let Triton's interpreter search its language once: it does at each call of a function within a kernel, which is
    a third of its time. What it finds and replaces stays the same.
    """
    interpreter = importlib.import_module("triton.runtime.interpreter")

    @functools.cache
    def names(language: object) -> list[str]:
        found = inspect.getmembers(language)
        return [name for name, member in found if interpreter.tl.core.is_builtin(member)]

    def replace(language: object, builder: object, scope: object) -> None:
        for name in names(language):
            if interpreter.tl.core.is_builtin(member := getattr(language, name)):
                interpreter._patch_attr(language, name, member, builder, scope)

    assert hasattr(interpreter, "_patch_builtin")
    interpreter._patch_builtin = replace


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what needs a GPU where there is none."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU"))


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Production's state, without run-time type checks: for what the product itself must refuse."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@dataclass
class Recorder:
    """What a block drafter's two functions were given and gave, in the order of the calls."""

    projected: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # states [n, D], positions [n]
    staged: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = field(default_factory=list)  # rows, positions, out


@pytest.fixture
def record(monkeypatch) -> Callable[[torch.nn.Module], Recorder]:
    """Listen to a block model's `project` and `stage`; both still do their work."""

    def listen(model: torch.nn.Module) -> Recorder:
        log, project, stage = Recorder(), model.project, model.stage

        def project_and_note(states, positions):
            log.projected.append((states[0], positions[0]))
            return project(states, positions)

        def stage_and_note(rows, positions, *others):
            hidden = stage(rows, positions, *others)
            log.staged.append((rows[0], positions[0], hidden[0]))
            return hidden

        monkeypatch.setattr(model, "project", project_and_note)
        monkeypatch.setattr(model, "stage", stage_and_note)
        return log

    return listen


@pytest.fixture(scope="session")
def goldens() -> Path:
    """The golden vectors: $DLOOP_GOLDENS, else ../shared/goldens beside the repository."""
    given = os.environ.get(GOLDENS_VARIABLE)
    if given is not None:
        assert Path(given).is_dir(), f"{GOLDENS_VARIABLE}={given!r} is not a folder"
        return Path(given)
    folder = ROOT.parent / "shared" / "goldens"
    if not folder.is_dir():
        pytest.skip(f"{GOLDENS_VARIABLE} is not set and {folder} does not exist")
    return folder


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The offline target, fetched once."""
    from dloop.offline import smollm2

    return smollm2()
