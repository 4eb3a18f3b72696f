"""The kernels compile to what they are written for. What they compute is tested in `test_fast.py`."""

import json
import os
import subprocess
import sys

import pytest
from conftest import ROOT

MATRIX = ("linear", "attend", "tree", "markov row")


def test_the_kernels_compile_for_a_hopper_gpu(tmp_path):
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests" / "compile_kernels.py")], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert len(found) == 19
    for name, counts in found.items():
        assert counts["griddepcontrol"] == 2, f"{name} does not overlap with its neighbours"
        assert (counts["wgmma.mma_async"] > 0) == name.startswith(MATRIX), f"{name}: {counts}"
        if name.startswith(("linear", "attend")):
            assert counts["cp.async.c"] > 0, f"{name} does not load ahead"
        if name.startswith(("linear", "markov row")):
            assert counts["prefetch"] > 0, f"{name} does not prefetch its weights"
