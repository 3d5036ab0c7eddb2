"""What all phases share: no attention kernel lives here. Names are loaded on first use (see common.runtime)."""

import importlib
import sys
from itertools import product
from pathlib import Path

_EXPORTS = {
    "runtime": "DEVICE INTERPRETED",
    "verify.inputs": "make_qkv make_tensor",
    "verify.reference": "sdpa_reference",
    "verify.harness": "verify_results verify_softmax Report",
}
_NEEDED = ("IPython", "matplotlib", "nbclient", "nbformat", "numpy", "rich", "torch", "triton", "typer")
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_HOME)


def _refuse_what_hides_packages() -> None:
    """Raise ImportError for a learner's `torch.py` in the root, where child processes start, or where this one looks
    for modules first: beside a notebook or a script of the course.
    """
    root, first = Path(__file__).resolve().parents[1], Path(sys.path[0]).resolve()
    ours = first.is_relative_to(root) and "site-packages" not in first.parts
    for folder, name in product({root, first} if ours else {root}, _NEEDED):
        for file in (folder / f"{name}.py", folder / name / "__init__.py"):
            if file.exists():
                raise ImportError(f"{file} hides the package {name}, which the course needs: rename it")


_refuse_what_hides_packages()


def __getattr__(name):
    # Lazy, so that the command line can import common.learn.cli without waiting for torch.
    if name in _HOME:
        return getattr(importlib.import_module(f"common.{_HOME[name]}"), name)
    raise AttributeError(f"module 'common' has no attribute {name!r}")
