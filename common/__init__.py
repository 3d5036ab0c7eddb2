"""What all phases share: no attention kernel lives here. Names are loaded on first use (see
common.runtime).
"""

import importlib

_EXPORTS = {
    "runtime": "DEVICE INTERPRETED",
    "verify.inputs": "make_qkv make_tensor",
    "verify.reference": "sdpa_reference",
    "verify.harness": "verify_results verify_softmax Report",
}
_HOME = {name: module for module, names in _EXPORTS.items() for name in names.split()}
__all__ = sorted(_HOME)


def __getattr__(name):
    # Lazy, so that the command line can import common.learn.cli without waiting for torch.
    if name in _HOME:
        return getattr(importlib.import_module(f"common.{_HOME[name]}"), name)
    raise AttributeError(f"module 'common' has no attribute {name!r}")
