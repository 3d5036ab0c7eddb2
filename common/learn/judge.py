"""The child's side of a check: `python -m common.learn.judge FOLDER EXERCISE FILE VERDICT`.

Loads an answer, gives it to FOLDER/checks/EXERCISE.py, and writes one JSON object to the file VERDICT: kind, message,
and whether there is a GPU. A check is a function `check` of the answer's module; it returns a few words on what was
verified, and rejects with `reject` or with any VerificationError.
"""

import contextlib
import importlib
import importlib.util
import itertools
import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from unittest import mock

from common import runtime
from common.measure import traffic
from common.verify import VerificationError, verify_results

import torch


class Rejected(Exception):
    """An answer is wrong. The message says what is wrong, in words that help to find the mistake."""


def reject(message: str) -> None:
    raise Rejected(message)


def expect_close(
    what: str,
    actual: torch.Tensor,
    expected: torch.Tensor,
    *,
    mistakes: Mapping[str, torch.Tensor] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Reject unless `actual` is a tensor like `expected`: same shape, same values, NaN nowhere but where expected.

    mistakes  sentence: what a well-known wrong answer gives. If that is what came out, the sentence is the message.
    """
    if not isinstance(actual, torch.Tensor):
        reject(f"{what}: expected a tensor, got {type(actual).__name__}")
    if actual.shape != expected.shape:
        reject(f"{what}: expected shape {tuple(expected.shape)}, got {tuple(actual.shape)}")

    def same(a, b):
        return torch.allclose(a.double(), b.double(), rtol=rtol, atol=atol, equal_nan=True)

    if same(actual, expected):
        return
    for sentence, wrong in (mistakes or {}).items():
        if wrong.shape == actual.shape and same(actual, wrong):
            reject(f"{what}: {sentence}")
    off = ~torch.isclose(actual.double(), expected.double(), rtol=rtol, atol=atol, equal_nan=True)
    index = tuple(off.nonzero()[0].tolist())
    got, right = actual[index].item(), expected[index].item()
    digits = next((d for d in (6, 9, 17) if f"{got:.{d}g}" != f"{right:.{d}g}"), 17)
    where = f"element [{', '.join(map(str, index))}]" if index else "it"
    dtypes = (
        f" (computed in {actual.dtype}, where {expected.dtype} is right?)" if actual.dtype != expected.dtype else ""
    )
    reject(
        f"{what}: {int(off.sum())} of {off.numel()} elements are wrong; the first: {where} is {got:.{digits}g} where "
        f"{right:.{digits}g} is right{dtypes}"
    )


def expect_verified(what: str, fn: Callable, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **options) -> None:
    """verify_results(...).check(), with `what` in front of its message."""
    try:
        verify_results(fn, q, k, v, compare_sdpa=False, **options).check()
    except VerificationError as wrong:
        reject(f"{what}: {wrong}")


def counted(**tensors: torch.Tensor) -> contextlib.AbstractContextManager[traffic.Traffic | None]:
    """traffic.measure where kernels are interpreted; otherwise None in its place."""
    return traffic.measure(**tensors) if runtime.INTERPRETED else contextlib.nullcontext()


def expect(
    what: str,
    found: torch.Tensor,
    right: torch.Tensor,
    *,
    mistakes: Mapping[str, torch.Tensor],
    signs: Mapping[str, bool] | None = None,
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> None:
    """expect_close in fp64. A mistake is recognized if what came out is far nearer to it than to the truth.

    mistakes  sentence: what the mistake gives        signs  sentence: whether what came out shows it
    """
    if isinstance(found, torch.Tensor) and found.shape == right.shape:
        found = found.double()
        if not torch.allclose(found, right, rtol=rtol, atol=atol):
            # Of zeros alone nobody can say where they come from.
            distances = {sentence: (found - wrong).norm().item() for sentence, wrong in mistakes.items() if wrong.any()}
            known = {sentence: distance for sentence, distance in distances.items() if not math.isnan(distance)}
            nearest = min(known, key=known.get, default=None)
            if nearest and known[nearest] < 0.05 * (found - right).norm().item():
                reject(f"{what}: {nearest}")
            for sentence, shown in (signs or {}).items():
                if shown:
                    reject(f"{what}: {sentence}")
    expect_close(what, found, right, rtol=rtol, atol=atol)


def guarded(fn, ask=lambda unwritten, outside: "is every store masked, and does its pointer stand at this head?"):
    """`fn`, its results o and lse allocated inside larger memory: rejects stores beside them and elements never stored.

    ask(unwritten, outside) returns the question that ends the message; both are lists of "o" and "lse".
    """
    edge, canary = 2**16, 1024.0  # room on each side for a tile of the largest head_dim, and for batch and head swapped
    empty, empty_like = torch.empty, torch.empty_like
    bits = {2: torch.int16, 4: torch.int32}

    def call(*args, **options):
        made = []

        def between(allocate):
            def allocated(*args, **options):
                wanted = allocate(*args, **options)
                elements = wanted.untyped_storage().nbytes() // wanted.itemsize
                # -1, all bits set, is a NaN in every dtype, and one that arithmetic does not give.
                memory = torch.full((elements + 2 * edge,), -1, dtype=bits[wanted.itemsize], device=wanted.device)
                memory = memory.view(wanted.dtype)
                memory[:edge] = memory[-edge:] = canary
                made.append((memory, memory.as_strided(wanted.shape, wanted.stride(), edge)))
                return made[-1][1]

            return allocated

        with mock.patch.multiple(torch, empty=between(empty), empty_like=between(empty_like)):
            result = fn(*args, **options)
        said, unwritten, outside = [], [], []
        for name, (memory, inner) in zip(itertools.cycle(("o", "lse")), made):
            left = inner.view(bits[inner.itemsize]) == -1
            if left.any() and inner.dtype not in runtime.KERNEL_DTYPE:  # those are copied
                unwritten.append(name)
                index = ", ".join(map(str, left.nonzero()[0].tolist()))
                said.append(
                    f"{name}: {int(left.sum())} of {left.numel()} elements were never stored, {name}[{index}] first"
                )
            if (torch.cat([memory[:edge], memory[-edge:]]) != canary).any():
                outside.append(name)
                said.append(f"something was stored outside of {name}")
        if said:
            reject(f"{'; '.join(said)}: {ask(unwritten, outside)}")
        return result

    return call


def load(path: Path, name: str = "answer") -> ModuleType:
    """The module in a file, executed anew each time."""
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def judge(check: Callable[[ModuleType], str], path: Path) -> dict:
    """Run a check on the answer in a file. Returns kind ("passed", "wrong", "error", "unfinished") and message."""
    try:
        return dict(kind="passed", message=check(load(path)) or "")
    except (Rejected, VerificationError) as wrong:
        return dict(kind="wrong", message=str(wrong))
    except BaseException as error:  # SystemExit and KeyboardInterrupt too, if the answer raises them
        root = root_of(error)
        kind = "unfinished" if is_stub(root) else "error"
        return dict(kind=kind, message=_described(root, error, path))


def root_of(error: BaseException) -> BaseException:
    """The error that all others in its chain came from."""
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


def is_stub(error: BaseException) -> bool:
    """True for the `raise NotImplementedError` of a file as shipped; PyTorch's own say what is not implemented."""
    return isinstance(error, NotImplementedError) and not str(error)


def _described(root: BaseException, error: BaseException, path: Path) -> str:
    """What was raised, and the innermost line of the learner's file that led there.

    The interpreter wraps an error inside a kernel in one of the launch; the innermost line is in the root's traceback.
    """
    chain = [root]
    while error is not root:
        chain.append(error)
        error = error.__cause__ or error.__context__
    own = next((own for e in chain if (own := _own_frames(e, path))), None)
    if is_stub(root):
        return f"line {own[-1].lineno} still raises NotImplementedError" if own else "there is still something to write"
    if isinstance(root, SyntaxError):
        return "".join(traceback.format_exception_only(root)).strip().replace(str(path), path.name)
    what = "".join(traceback.format_exception_only(root)).strip().replace("module 'answer'", path.name)
    if own:
        return f"{path.name}, line {own[-1].lineno}, in {own[-1].name}: {own[-1].line}\n{what}"
    return what


def _own_frames(error: BaseException, path: Path) -> list[traceback.FrameSummary]:
    return [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]


def main(folder: str, name: str, path: str, verdict: str) -> int:
    torch.set_num_threads(1)  # tensors are small
    check = importlib.import_module(f"{folder}.checks.{name}").check
    found = judge(check, Path(path)) | dict(gpu=torch.cuda.is_available(), interpreted=runtime.INTERPRETED)
    Path(verdict).write_text(json.dumps(found))
    return int(found["kind"] != "passed")


if __name__ == "__main__":
    # The module that the checks import, not this second copy of it: there must be one Rejected.
    raise SystemExit(importlib.import_module("common.learn.judge").main(*sys.argv[1:]))
