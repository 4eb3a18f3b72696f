"""What keeps the package readable: who imports whom, how long things are, what is documented."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import dloop

ROOT = Path(dloop.__file__).parent
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in sorted(ROOT.rglob("*.py"))}
MAX_FUNCTION_LINES = 40  # docstrings are not counted: they are asked for, not paid for
MAX_KERNEL_LINES = 80  # a kernel is one program, and half of it is its arguments
MAX_FILE_LINES = 300

ALGORITHM = {"types", "sampling", "gate", "errors"}
ALLOWED = {"errors": set(), "types": {"errors"}, "sampling": {"types"}}
ALLOWED |= {name: ALGORITHM for name in ("loop", "gate", "judge")}
FORBIDDEN = {"drafters": {"targets", "api", "load"}, "targets": {"drafters", "api", "load"}}
TOP = {"cli", "bench", "serve", "__main__"}  # sit on everything; nothing below imports them


def imports_of(source: str) -> set[str]:
    """Modules of ours that this source imports anywhere, inside functions too, without the leading `dloop.`."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "dloop" else {node.module}
            )
        assert not (isinstance(node, ast.ImportFrom) and node.level), "relative imports hide the direction"
    return {name.removeprefix("dloop.") for name in names if name.startswith("dloop.")}


def import_faults(module: str, source: str) -> list[str]:
    package = module.split(".")[0]
    faults: list[str] = []
    for name in imports_of(source):
        other = name.split(".")[0]
        if package in ALLOWED and other not in ALLOWED[package]:
            faults.append(f"{module} imports {name}")
        if other in FORBIDDEN.get(package, ()):
            faults.append(f"{module} imports {name}")
        if other in TOP and package not in TOP:
            faults.append(f"{module} imports {name}")
    return faults


def length_faults(module: str, source: str) -> list[str]:
    faults = [f"{module} has {n} lines"] if (n := len(source.splitlines())) > MAX_FILE_LINES else []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            documentation = ast.get_docstring(node, clean=False) or ""
            count = (node.end_lineno or 0) - node.lineno + 1 - len(documentation.splitlines())
            if count > (MAX_KERNEL_LINES if node.name.endswith("_kernel") else MAX_FUNCTION_LINES):
                faults.append(f"{module}.{node.name} has {count} lines")
    return faults


def documentation_faults(module: str, source: str) -> list[str]:
    """Modules, public classes and public functions say what they give; methods are their class's or protocol's.

    Of `cli`, nobody's library, only the modules and the commands (whose docstrings are the help).
    """
    tree = ast.parse(source)
    faults = [module] if tree.body and not ast.get_docstring(tree) else []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            if not ast.get_docstring(node) and (not module.startswith("cli.") or node.name == "Command"):
                faults.append(f"{module}.{node.name}")
    return faults


CHECKS = {"imports": import_faults, "lengths": length_faults, "documentation": documentation_faults}


@pytest.mark.parametrize("check", CHECKS)
def test_the_package_keeps_its_shape(check):
    faults = [fault for module, path in MODULES.items() for fault in CHECKS[check](module, path.read_text())]
    assert faults == []


@pytest.mark.parametrize(
    ("check", "module", "source"),
    [
        ("imports", "types", "import dloop.sampling"),
        ("imports", "gate", "from dloop.loop import decode"),
        ("imports", "judge", "def f():\n    from dloop.drafters.block import BlockDrafter\n"),
        ("imports", "loop", "from dloop import api"),
        ("imports", "drafters.block", "from dloop.targets.hf import HFTarget"),
        ("imports", "targets.hf", "from dloop.drafters.block import BlockDrafter"),
        ("imports", "train.block", "import dloop.cli.main"),
        ("lengths", "x", "def f():\n" + "    pass\n" * 41),
        ("lengths", "x", "pass\n" * 301),
        ("documentation", "x", "x = 1"),
        ("documentation", "x", '"""Doc."""\ndef f(): ...'),
        ("documentation", "x", '"""Doc."""\nclass C: ...'),
        ("documentation", "cli.x", '"""Doc."""\nclass Command: ...'),
    ],
)
def test_planted_faults_are_found(check, module, source):
    assert CHECKS[check](module, source)


def test_allowed_things_are_not_faults():
    assert import_faults("loop", "import torch\nfrom dloop.types import Draft\nfrom dloop.gate import Gate") == []
    assert import_faults("cli.main", "from dloop.cli.args import parse") == []
    assert length_faults("x", "def f():\n    '''" + "doc\n" * 60 + "'''\n" + "    pass\n" * 38) == []


def test_annotations_are_never_strings_for_a_whole_file():
    """`from __future__ import annotations` would defeat the run-time shape checks."""
    assert [name for name, path in MODULES.items() if "from __future__ import annotations" in path.read_text()] == []


def test_import_is_lazy_and_public_names_exist():
    code = (
        "import sys, dloop; assert not {'torch', 'transformers', 'numpy'} & set(sys.modules); print(dloop.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=True)
    assert done.stdout.strip() == dloop.__version__
    for name in dloop.__all__:
        assert getattr(dloop, name).__doc__
    with pytest.raises(AttributeError, match="generate_autoregressive"):
        _ = dloop.generat
