"""The child's side of a check: `python -m common.learn.judge FOLDER EXERCISE FILE VERDICT`.

Loads an answer, gives it to FOLDER/checks/EXERCISE.py, and writes one JSON object to the file
VERDICT: kind, message, whether there is a GPU, and launches of the answer's kernels for the compiler
to look at; where Python crashes, or is asked by SIGUSR1, the stack goes to VERDICT.stack. A check is
a function `check` of the answer's module; it returns a few words on what was verified, and rejects
with `reject` or with any VerificationError.
"""

import ast
import bdb
import contextlib
import ctypes
import faulthandler
import importlib
import importlib.util
import inspect
import io
import itertools
import json
import math
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock

from common import runtime
from common.arguments import arguments
from common.learn import errors, offline_answer
from common.measure import traffic
from common.verify import VerificationError, guard, verify_results

import torch
from torch.overrides import TorchFunctionMode


class Rejected(Exception):
    """An answer is wrong. The message says what is wrong, in words that help to find the
    mistake. kind: of the verdict, where another process has judged.
    """

    def __init__(self, message: str, kind: str = "wrong"):
        super().__init__(message)
        self.kind = kind


def reject(message: str) -> None:
    raise Rejected(message)


def require(
    what: str,
    actual: torch.Tensor,
    right: torch.Tensor,
    *,
    mistakes: Mapping[str, torch.Tensor] | None = None,
    signs: Mapping[str, bool] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> None:
    """Reject unless `actual` is a tensor like `right`: same shape, same values, NaN in the same places.

    mistakes  sentence: the result of a well-known mistake. The sentence is the message where `actual` is far
              nearer to that result than to `right`.
    signs     sentence: whether `actual` shows this sign; asked where no mistake is recognized
    """
    if not isinstance(actual, torch.Tensor):
        reject(f"{what}: expected a tensor, got {type(actual).__name__}")
    if actual.shape != right.shape:
        reject(f"{what}: expected shape {tuple(right.shape)}, got {tuple(actual.shape)}")
    given_dtype, wanted_dtype = actual.dtype, right.dtype
    actual, right = actual.double(), right.double()
    close = torch.isclose(actual, right, rtol=rtol, atol=atol, equal_nan=True)
    if close.all():
        return
    sentence = _recognized(actual, right, mistakes or {}, dict(rtol=rtol, atol=atol, equal_nan=True))
    sentence = sentence or next((sign for sign, shown in (signs or {}).items() if shown), None)
    sentence = sentence or _related(actual, right)
    if sentence:
        reject(f"{what}: {sentence}")
    index = tuple((~close).nonzero()[0].tolist())
    got, wanted = actual[index].item(), right[index].item()
    digits = next((d for d in (6, 9, 17) if f"{got:.{d}g}" != f"{wanted:.{d}g}"), 17)
    where = f"element [{', '.join(map(str, index))}]" if index else "it"
    size = right.nan_to_num(0, 0, 0).abs().max().item()
    exact = rtol < 2.0**-24 and atol < 2.0**-24 * size  # more than fp32 can give
    short = given_dtype != wanted_dtype and torch.allclose(actual, right, rtol=1e-6, atol=1e-6 * size)
    dtypes = f" (computed in {given_dtype}, where {wanted_dtype} is right?)" if exact and short else ""
    reject(
        f"{what}: {int((~close).sum())} of {close.numel()} elements are wrong; the first: {where} is "
        f"{got:.{digits}g} where {wanted:.{digits}g} is right{dtypes}"
    )


def _recognized(actual, right, mistakes, tolerance) -> str | None:
    """The sentence of the mistake whose result is nearest to `actual`, if it is near enough."""
    distances = {}
    several_zero = sum(not wrong.any() for wrong in mistakes.values()) > 1
    for sentence, wrong in mistakes.items():
        if wrong.shape != right.shape or (several_zero and not wrong.any()):  # which one is it?
            continue
        distance = (actual - wrong).norm().item()
        if torch.allclose(actual, wrong.double(), **tolerance):
            distance = 0.0
        if not math.isnan(distance):
            distances[sentence] = distance
    nearest = min(distances, key=distances.get, default=None)
    if nearest is None:
        return None
    near = distances[nearest] == 0 or distances[nearest] < 0.05 * (actual - right).norm().item()
    return nearest if near else None


def _related(actual, right) -> str | None:
    """What is said of a result that is the right one times a number, or transposed."""
    if right.numel() < 8 or not (right.any() and right.isfinite().all() and actual.isfinite().all()):
        return None
    factor = ((actual * right).sum() / (right * right).sum()).item()
    close = dict(rtol=1e-3, atol=1e-3 * right.abs().max().item())
    if abs(factor) > 0.01 and f"{factor:.4g}" != "1" and torch.allclose(actual / factor, right, **close):
        return f"every element is {factor:.4g} times what is right: which factor is that, or which is missing?"
    if right.dim() > 1 and right.shape[-1] == right.shape[-2] and torch.allclose(actual.mT, right, **close):
        return "it is transposed: rows and columns are exchanged"
    return None


def require_verified(what: str, fn: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> None:
    """verify_results(...).check(), with `what` in front of its message."""
    try:
        verify_results(fn, q, k, v, compare_sdpa=False, **options).check()
    except VerificationError as wrong:
        reject(f"{what}: {wrong}")


def counted(**tensors: torch.Tensor) -> contextlib.AbstractContextManager[traffic.Traffic | None]:
    """traffic.measure where kernels are interpreted; otherwise None in its place."""
    return traffic.measure(**tensors) if runtime.INTERPRETED else contextlib.nullcontext()


def require_ieee(answer: ModuleType) -> None:
    """Reject a tl.dot that would use TF32 on a GPU: interpreted, it cannot be seen in the result."""
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        if not (isinstance(node, ast.Call) and ast.unparse(node.func) in ("tl.dot", "dot")):
            continue
        given = {k.arg: ast.unparse(k.value) for k in node.keywords}
        precision = [given.get("input_precision"), *map(ast.unparse, node.args[3:4])]
        if not {"'ieee'", "'tf32x3'"} & set(precision) and given.get("allow_tf32") != "False":
            reject(
                f'line {node.lineno}: tl.dot without input_precision="ieee". The result is right here, but on a '
                "GPU this product cuts fp32 inputs to the 10 bits of TF32, unseen when interpreted"
            )


def require_narrow_products(answer: ModuleType, run: Callable[[], object], products=0) -> None:
    """Reject products of two fp32 tiles where all inputs are fp16, and fewer tl.dot than `products`: either is right,
    but not on the tensor cores. run() runs the answer's kernel on inputs in fp16.
    """
    if not runtime.INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot, wide, done = InterpreterBuilder.create_dot, set(), 0

    def watched(builder, a, b, *args):
        nonlocal done
        done += 1
        if a.data.dtype.itemsize == b.data.dtype.itemsize == 4:
            frame = sys._getframe(1)
            while frame and frame.f_code.co_filename != answer.__file__:
                frame = frame.f_back
            wide.add(frame.f_lineno if frame else 0)
        return create_dot(builder, a, b, *args)

    with mock.patch.object(InterpreterBuilder, "create_dot", watched):
        run()
    if done < products:
        reject(
            f"{done} products of tiles are computed by tl.dot, where {products} are needed: a product by tl.sum is "
            "right, but not on the tensor cores"
        )
    if wide:
        reject(
            f"line {min(wide)}: this product takes two tiles in fp32, though all inputs are fp16. The result is right, "
            "but on a GPU it leaves the tensor cores idle. Convert P or dS down to the dtype of the other tile, not "
            "that one up; q and k go in as they are loaded"
        )


@contextlib.contextmanager
def masked_loads_undefined() -> Iterator[None]:
    """Inside, interpreted loads that have a mask and no `other` find NaN where the mask is false, not the interpreter's
    zeros: compiled, neither is promised.
    """
    if not runtime.INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import TensorHandle
    from triton.runtime.interpreter import interpreter_builder as builder

    load = builder.create_masked_load

    def undefined(ptrs, mask, other, *args, **kwargs):
        dtype = ptrs.get_element_ty()
        if other is None and dtype.is_floating():
            zeros = load(ptrs, TensorHandle(mask.data & False, mask.dtype), None, *args, **kwargs)
            other = TensorHandle(zeros.data + zeros.data.dtype.type("nan"), dtype)
        return load(ptrs, mask, other, *args, **kwargs)

    with mock.patch.object(builder, "create_masked_load", undefined):
        yield


def tiles_of(block_m: int, block_n: int) -> contextlib.AbstractContextManager:
    """Inside, interpreted kernels work in tiles of this shape, whatever head_dim and dtype are; compiled ones in those
    that suit the GPU.
    """
    if not runtime.INTERPRETED:
        return contextlib.nullcontext()
    tiles = dict(BLOCK_M=block_m, BLOCK_N=block_n, num_warps=4, num_stages=1)
    return mock.patch.object(runtime, "tile_sizes", return_value=tiles)


class NoHelp(TorchFunctionMode):
    """Inside, a launcher that has PyTorch compute, or copy what the kernel should read in place, is rejected."""

    COMPUTE = (
        "softmax logsumexp exp exp2 matmul rmatmul mm bmm baddbmm addmm linear einsum pad scaled_dot_product_attention"
    )
    COPY = "contiguous clone repeat repeat_interleave"

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__.strip("_")
        if name in self.COMPUTE.split():
            reject(f"PyTorch's {name} is called in the launcher: the kernel computes")
        if name in self.COPY.split():
            reject(f"PyTorch's {name} is called in the launcher: read the inputs in place, by their strides")
        return function(*args, **(kwargs or {}))


def misread(x: torch.Tensor, like: torch.Tensor) -> dict[str, torch.Tensor]:
    """x (batch, heads, seq, head_dim) as it is read with the strides of another tensor: in the head and between heads,
    in the head alone, between heads alone.
    """
    x_head, like_head = x.stride()[2:], like.stride()[2:]
    x_base, like_base = x.stride()[:2], like.stride()[:2]
    strides = {
        "": (*like_base, *like_head),
        " within a head": (*x_base, *like_head),
        " between heads": (*like_base, *x_head),
    }
    return {where: x.as_strided(x.shape, stride) for where, stride in strides.items()}


def guarded(
    fn: Callable,
    ask: Callable[[list[str], list[str]], str] = lambda unwritten, outside: (
        "is every store masked, and does its pointer stand at this head?"
    ),
) -> Callable:
    """`fn` with its results o and lse guarded: rejects stores beside them and elements that are never stored.

    ask(unwritten, outside) returns the question that ends the message; both are lists of "o" and "lse".
    """

    def call(*args, **options):
        with guard.watched() as results:
            returned = fn(*args, **options)
        problems, unwritten, outside = [], [], []
        for name, result in zip(itertools.cycle(("o", "lse")), results):
            missing = guard.never_stored(result.tensor)
            # In a dtype that kernels do not compute in, a result is a copy, stored as a whole.
            if missing.any() and result.tensor.dtype not in runtime.KERNEL_DTYPE:
                unwritten.append(name)
                first = ", ".join(map(str, missing.nonzero()[0].tolist()))
                count = f"{int(missing.sum())} of {missing.numel()} elements"
                problems.append(f"{name}: {count} were never stored, {name}[{first}] first")
            if result.stored_outside:
                outside.append(name)
                problems.append(f"something was stored outside of {name}")
        if problems:
            reject(f"{'; '.join(problems)}: {ask(unwritten, outside)}")
        return returned

    return call


def load(path: Path, name: str = "answer") -> ModuleType:
    """The module in a file, executed anew each time."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(check: Callable[[ModuleType], str], path: Path) -> dict:
    """Run a check on the answer in a file. Returns kind ("passed", "wrong", "error",
    "unfinished") and message.
    """
    try:
        with _no_truth_of_blocks(path), _functions_kept():
            return dict(kind="passed", message=check(_loaded(path)) or "")
    except (Rejected, VerificationError) as wrong:
        return dict(kind=getattr(wrong, "kind", "wrong"), message=str(wrong))
    # SystemExit and KeyboardInterrupt too, if the answer raises them.
    except BaseException as error:
        kind = "unfinished" if errors.is_stub(errors.root_of(error, path)) else "error"
        return dict(kind=kind, message=errors.described(error, path))


def _loaded(path: Path) -> ModuleType:
    """The answer, with PyTorch's defaults as they were before it: a check's own tensors follow them."""
    dtype, grad = torch.get_default_dtype(), torch.is_grad_enabled()
    try:
        return load(path)
    finally:
        torch.set_default_dtype(dtype)
        torch.set_default_device(None)
        torch.set_grad_enabled(grad)


@contextlib.contextmanager
def _functions_kept() -> Iterator[None]:
    """Rejects an answer that replaces a function of PyTorch or of the course: its check may use it."""
    before = _functions()
    yield
    now = _functions()
    for (owner, name), function in before.items():
        kept = now.get((owner, name), print)
        # PyTorch itself wraps some when it is first compiled.
        if kept is not function and inspect.unwrap(kept) is not inspect.unwrap(function):
            raise Rejected(f"the answer replaces {owner}.{name}, which its check may use: leave it")


def _functions() -> dict[tuple[str, str], Callable]:
    """The functions and classes of PyTorch's first level, of `common` and of the checks, by module and name."""
    ours = [name for name in sys.modules if re.match(r"common\b|\w+\.checks\b", name)]
    owners = {name: vars(sys.modules[name]) for name in ("torch", *ours)}
    owners["torch.Tensor"] = vars(torch._C.TensorBase) | vars(torch.Tensor)
    return {(owner, name): value for owner, held in owners.items() for name, value in held.items() if callable(value)}


@contextlib.contextmanager
def _no_truth_of_blocks(path: Path) -> Iterator[None]:
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
def after(right: str) -> Iterator[None]:
    """Inside, where a part of the answer is still to be written, the message begins with what is right already."""
    try:
        yield
    except BaseException as error:
        if errors.is_stub(errors.root_of(error)):
            errors.root_of(error).add_note(f"right so far: {right}. Next: ")
        raise


class _Capped(io.TextIOBase):
    """Passes on what is printed, up to a number of characters."""

    def __init__(self, stream, characters: int = 20_000):
        self.stream, self.left = stream, characters

    def write(self, text: str) -> int:
        if self.left > 0:
            self.stream.write(text[: self.left])
            if len(text) >= self.left:
                self.stream.write("\n... the rest of what the answer prints is not shown\n")
        self.left -= len(text)
        return len(text)

    def flush(self) -> None:
        self.stream.flush()


def _no_debugger(*_, **__):
    raise bdb.BdbQuit


PR_SET_PDEATHSIG = 1  # of Linux's prctl


def end_with_parent() -> None:
    """This process is killed with its parent, also where that one cannot end it: its terminal is closed."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def main(folder: str, name: str, path: str, verdict: str) -> int:
    end_with_parent()
    stack = open(f"{verdict}.stack", "w")  # noqa: SIM115 - open until the process ends
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # a terminal that cannot show a letter shows "?"
    sys.stdout, sys.stderr = _Capped(sys.stdout), _Capped(sys.stderr)
    sys.breakpointhook = _no_debugger
    torch.set_num_threads(1)  # tensors are small
    try:
        check = importlib.import_module(f"{folder}.checks.{name}").check
    except Exception as error:
        outcome = dict(kind="crashed", message=errors.of_the_course(error))
        Path(verdict).write_text(json.dumps(outcome))
        return 1
    own, sys.argv = (os.getpid(), [""])  # an answer that writes to its last argument means another one
    with offline_answer.launches_of(Path(path)) as launches:
        outcome = judge(check, Path(path))
    if os.getpid() != own:  # a process that the answer forked, which has no say
        os._exit(1)
    outcome |= dict(gpu=torch.cuda.is_available(), launches=list(launches.values()))
    Path(verdict).write_text(json.dumps(outcome))
    return int(outcome["kind"] != "passed")


if __name__ == "__main__":
    # The module that the checks import, not this second copy of it: there must be one Rejected.
    given = arguments("folder", "exercise", "file", "verdict")
    code = importlib.import_module("common.learn.judge").main(*given)
    with contextlib.suppress(AttributeError, OSError, ValueError):  # if the answer has closed them
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)  # not held up by threads that the answer has started
