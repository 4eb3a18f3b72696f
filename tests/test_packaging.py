"""What is published: the wheel, the command it installs, the weight of its dependencies, the files around it."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterable
from fnmatch import fnmatch
from importlib.metadata import requires
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
DRAFTER = ROOT / "dloop" / "demo_drafter"
LOCAL = (".git", ".venv", "build", "dist", "*.egg-info", "results", "outputs", ".carry", "__pycache__", ".*_cache")


def run(*command: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        command, cwd=cwd, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done


@pytest.fixture(scope="session")
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="session")
def version() -> str:
    (found,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "dloop" / "__init__.py").read_text(), re.MULTILINE)
    return found


@pytest.fixture(scope="session")
def wheel(tmp_path_factory) -> Path:
    """The wheel, built from a copy: setuptools would keep files deleted since in the tree's own build folder."""
    tree, out = tmp_path_factory.mktemp("source") / "tree", tmp_path_factory.mktemp("wheel")
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*LOCAL))
    isolation = ["--no-build-isolation"] if importlib.util.find_spec("setuptools") else []
    run(sys.executable, "-m", "pip", "wheel", "--no-deps", *isolation, "-w", str(out), str(tree), cwd=tree)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel, tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target", str(target), str(wheel)]
    run(*command, cwd=target)
    return target


@pytest.mark.slow
def test_wheel_holds_the_package_whole_and_nothing_else(wheel, version):
    names = set(zipfile.ZipFile(wheel).namelist())
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "dloop").rglob("*.py")}
    drafter = {str(path.relative_to(ROOT)) for path in DRAFTER.rglob("*") if path.is_file()}
    assert modules | drafter | {"dloop/py.typed"} <= names
    information = f"dloop_decoding-{version}.dist-info"
    assert {name.split("/")[0] for name in names} == {"dloop", information}
    assert {f"{information}/licenses/LICENSE", f"{information}/licenses/NOTICE"} <= names


@pytest.mark.slow
def test_installed_wheel_names_its_version(installed, version, tmp_path):
    env = {"PYTHONPATH": str(installed)}
    home = run(sys.executable, "-c", "import dloop; print(dloop.__file__)", cwd=tmp_path, env=env).stdout
    assert Path(home.strip()).is_relative_to(installed)
    assert version in run(sys.executable, "-m", "dloop", "--version", cwd=tmp_path, env=env).stdout


@pytest.mark.slow
def test_installed_wheel_decodes_with_its_own_drafter(installed, smollm2_dir, tmp_path):
    models = ["--model", "smollm2", "--draft-model", "demo"]
    command = [sys.executable, "-m", "dloop", "generate", *models, "--max-new-tokens", "16", "--json"]
    document = json.loads(run(*command, cwd=tmp_path, env={"PYTHONPATH": str(installed)}).stdout)
    assert 0 < len(document["tokens"]) <= 16


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_command_answers_without_importing_models(flag):
    log = run(sys.executable, "-X", "importtime", "-m", "dloop", flag, cwd=ROOT).stderr
    imported = {
        line.split("|")[-1].strip().split(".")[0] for line in log.splitlines() if line.startswith("import time:")
    }
    assert "dloop" in imported and not imported & {"torch", "transformers"}


def closure(roots: Iterable[Requirement]) -> set[str]:
    """Names of the installed distributions that `roots` pull in, themselves included."""
    found: set[tuple[str, str]] = set()
    waiting = [(root, "") for root in roots]
    while waiting:
        requirement, extra_of_parent = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra_of_parent}):
            continue
        name = canonicalize_name(requirement.name)
        for extra in {"", *requirement.extras}:
            if (name, extra) not in found:
                found.add((name, extra))
                waiting += [(Requirement(line), extra) for line in requires(name) or []]
    return {name for name, _ in found}


def test_core_is_at_most_35_distributions_beyond_those_of_torch(project):
    core = closure(map(Requirement, project["dependencies"]))
    beyond = core - closure([Requirement("torch")])
    assert {"transformers", "numpy", "rich"} <= beyond
    assert len(beyond) <= 35, sorted(beyond)


def test_extras_and_interpreters_are_the_published_ones(project):
    assert set(project["optional-dependencies"]) == {"train", "bench", "plot", "serve", "mtp", "demo", "dev"}
    assert (project["name"], project["requires-python"]) == ("dloop-decoding", ">=3.11,<3.14")


def test_tracked_tree_is_at_most_28_mib():
    if (ROOT / ".git").exists():
        files = [ROOT / name for name in run("git", "ls-files", "-z", cwd=ROOT).stdout.split("\0") if name]
    else:
        files = [path for path in ROOT.rglob("*") if not is_local(path)]
    sizes = {path: path.stat().st_size for path in files if path.is_file()}
    largest = sorted(sizes, key=lambda path: -sizes[path])[:5]
    assert sum(sizes.values()) <= 28 << 20, [f"{path.relative_to(ROOT)}: {sizes[path]}" for path in largest]


def is_local(path: Path) -> bool:
    return any(fnmatch(part, pattern) for part in path.relative_to(ROOT).parts for pattern in LOCAL)


@pytest.mark.parametrize("name", ["LICENSE", "NOTICE", "CITATION.cff", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_project_file_is_there(name):
    assert (ROOT / name).read_text().strip()


@pytest.mark.parametrize("words", ["make demo", "make test", "independent implementation", "2610.07659"])
def test_readme_says(words):
    assert words in (ROOT / "README.md").read_text()


def test_citation_names_this_version_and_the_paper(version):
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert str(citation["version"]) == version
    assert citation["preferred-citation"]["title"] == "DLoop: Looped Speculative Decoding"


@pytest.mark.parametrize("exits", [[0], [75, 75, 0], [75, 3], [130]])
def test_make_reproduce_small_goes_on_while_the_time_was_up(exits, tmp_path):
    """A stand-in for the environment's Python says how each call ends."""
    calls, prompts = tmp_path / "calls", tmp_path / "prompts.jsonl"
    prompts.touch()
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    answers = " ".join(map(str, exits))
    lines = [f'echo "$@" >> {calls}', f"set -- {answers}", f"shift $(($(wc -l < {calls}) - 1))", "exit $1"]
    python.write_text("#!/bin/sh\n" + "\n".join(lines) + "\n")
    python.chmod(0o755)
    words = ["make", "-s", "-o", ".venv/.installed", "reproduce-small", f"BIN={python.parent}", f"PROMPTS={prompts}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert len(calls.read_text().splitlines()) == len(exits)
    assert (done.returncode == 0) == (exits[-1] == 0), done.stderr
    assert f"scripts/reproduce_small.py --prompts {prompts}" in calls.read_text()
