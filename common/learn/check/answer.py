"""An answer as a module: how it is loaded, and what is watched while its kernels are interpreted."""

import contextlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from unittest import mock

from common import runtime
from common.measure import offline

import torch


def load(path: Path, name: str = "answer") -> ModuleType:
    """The module in a file, executed anew. PyTorch's defaults stay as they were, as a check's tensors follow them."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        spec.loader.exec_module(module)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(grad)
    return module


@contextlib.contextmanager
def no_truth_of_blocks(path: Path) -> Iterator[None]:
    """Inside, an interpreted kernel in this file that takes a block for one yes or no is stopped. The interpreter calls
    every block true. The compiler refuses such an `if`, and takes `and` for `&`.
    """
    if not runtime.INTERPRETED:
        yield
        return
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patched(tensor, *scope):
        patch_tensor(tensor, *scope)
        truth = tensor.__bool__

        def checked(block):
            if block.handle.data.size > 1 and Path(sys._getframe(1).f_code.co_filename) == path:
                raise TypeError(
                    "a block has no single truth value, and `if`, `and`, `or`, `not`, Python's max and min, or a chain "
                    "such as 0 <= i < n asks for one. Element by element: tl.where(condition, a, b), &, |, ~, "
                    "tl.maximum, and (0 <= i) & (i < n)"
                )
            return truth(block)

        if scope:  # a Triton that takes back at its end what a launch has patched
            scope[0].set_attr(tensor, "__bool__", checked)
        else:
            tensor.__bool__ = checked

    with mock.patch.object(interpreter, "_patch_lang_tensor", patched):
        yield


@contextlib.contextmanager
def launches_of(path: Path) -> Iterator[dict[tuple, dict]]:
    """Yields a dict that fills with interpreted launches, one of each kernel and choice of its flags.

    Recorded are the kernels in the file, and others that take one of its functions as an argument. Left out are kernels
    elsewhere that reach the file in another way, and arguments of a type that common.measure.offline does not know; no
    check has any of these.
    """
    launches = {}
    if not runtime.INTERPRETED:
        yield launches
        return
    from triton.runtime.interpreter import InterpretedFunction

    run = InterpretedFunction.run

    def is_answer(value) -> bool:
        return isinstance(value, InterpretedFunction) and value.fn.__code__.co_filename == str(path)

    def watched(kernel, *args, grid, warmup, **options):
        if any(map(is_answer, (kernel, *args, *options.values()))):
            with contextlib.suppress(Exception):  # the verdict does not depend on it
                launch = asdict(offline.describe(kernel, args, options))
                flags = (value for _, value in launch["constexprs"] if isinstance(value, bool))
                json.dumps(launch)
                launches.setdefault((launch["module"], launch["name"], *flags), launch)
        return run(kernel, *args, grid=grid, warmup=warmup, **options)

    with mock.patch.object(InterpretedFunction, "run", watched):
        yield launches
