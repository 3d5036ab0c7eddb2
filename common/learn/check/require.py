"""What a check says of an answer: the assertions and tools that phaseN_x/checks/name.py imports.

A check is a function `check` of the answer's module. It returns a few words on what was verified, and rejects with
`reject` or with any VerificationError.
"""

import contextlib
import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import ModuleType
from unittest import mock

from common import runtime
from common.learn.check import errors
from common.measure import traffic
from common.verify import VerificationError, guard, verify_results
from common.verify.harness import NEVER_STORED, STORED_OUTSIDE

import torch
from torch.overrides import TorchFunctionMode


class Rejected(Exception):
    """An answer is wrong. The message says what is wrong, in words that help to find the mistake. kind: of the verdict,
    where another process has judged.
    """

    def __init__(self, message: str, kind: str = "wrong"):
        super().__init__(message)
        self.kind = kind


def reject(message: str) -> None:
    raise Rejected(message)


def require_none(signs: Mapping[str, bool], what: str = "") -> None:
    """Reject by the first sentence whose sign is shown, with `what` in front of it. signs: sentence: whether it is."""
    for sentence, shown in signs.items():
        if shown:
            reject(f"{what}: {sentence}" if what else sentence)


def close(actual: torch.Tensor, right: torch.Tensor, tolerance: float = 1e-4) -> bool:
    """Whether two tensors are alike, element by element, in fp64."""
    return torch.allclose(actual.double(), right.double(), rtol=tolerance, atol=tolerance)


def require(
    what: str,
    actual: torch.Tensor,
    right: torch.Tensor,
    *,
    mistakes: Mapping[str, torch.Tensor] | None = None,
    signs: Mapping[str, bool] | None = None,
    verify: Callable[[], object] = lambda: None,
    rtol: float = 1e-4,
    atol: float = 1e-4,
) -> None:
    """Reject unless `actual` is a tensor like `right`: same shape, same values, NaN in the same places.

    mistakes  sentence: the result of a well-known mistake. The sentence is the message where `actual` is far
              nearer to that result than to `right`.
    signs     sentence: whether `actual` shows this sign; asked where no mistake is recognized
    verify    called where none of these explains it: rejects with the hint of verify_results
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
    verify()
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


def require_tensor_cores(answer: ModuleType, run: Callable[[], object], products=0) -> None:
    """Reject products in TF32, products of two fp32 tiles where all inputs are fp16, and fewer tl.dot than `products`:
    each is right when interpreted, but not on the tensor cores. run() runs the answer's kernel on inputs in fp16.

    The precision is what the compiler would be given, however the source spells it. On a GPU nothing is asked: there
    the results in fp32 show it.
    """
    if not runtime.INTERPRETED:
        return
    from triton.runtime.interpreter import InterpreterBuilder

    create_dot, cut, wide, done = InterpreterBuilder.create_dot, set(), set(), 0

    def watched(builder, a, b, acc, precision, *args):
        nonlocal done
        done += 1
        frame = sys._getframe(1)
        while frame and frame.f_code.co_filename != answer.__file__:
            frame = frame.f_back
        line = frame.f_lineno if frame else 0
        if precision.name not in ("IEEE", "TF32x3"):
            cut.add(line)
        if a.data.dtype.itemsize == b.data.dtype.itemsize == 4:
            wide.add(line)
        return create_dot(builder, a, b, acc, precision, *args)

    with mock.patch.object(InterpreterBuilder, "create_dot", watched):
        run()
    signs = {
        f'line {min(cut, default=0)}: tl.dot without input_precision="ieee". The result is right here, but on a GPU '
        "this product cuts fp32 inputs to the 10 bits of TF32, unseen when interpreted": cut,
        f"{done} products of tiles are computed by tl.dot, where {products} are needed: a product by tl.sum is "
        "right, but not on the tensor cores": done < products,
        f"line {min(wide, default=0)}: this product takes two tiles in fp32, though all inputs are fp16. The result is "
        "right, but on a GPU it leaves the tensor cores idle. Convert P or dS down to the dtype of the other tile, not "
        "that one up; q and k go in as they are loaded": wide,
    }
    require_none(signs)


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


class NoCalls(TorchFunctionMode):
    """Inside, calls of PyTorch are rejected. said: {names of functions: sentence}, each with {name} in it."""

    def __init__(self, said: Mapping[str, str]):
        super().__init__()
        self.said = {name: sentence for names, sentence in said.items() for name in names.split()}

    def __torch_function__(self, function, types, args=(), kwargs=None):
        name = function.__name__.strip("_")
        if name in self.said:
            reject(self.said[name].format(name=name))
        return function(*args, **(kwargs or {}))


_HELP = {
    "softmax logsumexp exp exp2 matmul rmatmul mm bmm baddbmm addmm linear einsum pad "
    "scaled_dot_product_attention": "PyTorch's {name} is called in the launcher: the kernel computes",
    "contiguous clone repeat repeat_interleave": (
        "PyTorch's {name} is called in the launcher: read the inputs in place, by their strides"
    ),
}
# A launcher that has PyTorch compute, or copy what the kernel should read in place, is rejected.
NoHelp = functools.partial(NoCalls, _HELP)


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


def _of_stores(unwritten: list[str], outside: list[str]) -> str:
    return STORED_OUTSIDE if outside else NEVER_STORED


def guarded(fn: Callable, ask: Callable = _of_stores, names: Iterable[str] = ("o", "lse")) -> Callable:
    """`fn`, which returns results of these names, under `require_stored`."""

    def call(*args, **options):
        with guard.watched() as allocated:
            returned = fn(*args, **options)
        results = returned if isinstance(returned, tuple | list) else (returned,)
        require_stored(dict(zip(names, results, strict=False)), allocated, ask)
        return returned

    return call


def require_stored(
    results: Mapping[str, object], allocated: list[guard.Result], ask: Callable = _of_stores, what: str = ""
) -> None:
    """Reject elements of results that are never stored, and stores beside what was allocated in guard.watched.

    ask(unwritten, outside) returns the question that ends the message; both are lists of names.
    """
    problems, unwritten, outside = [], [], []
    for name, t in results.items():
        missing = guard.never_stored(t) if isinstance(t, torch.Tensor) else torch.zeros(0, dtype=torch.bool)
        if missing.any():
            unwritten.append(name)
            first = ", ".join(map(str, missing.nonzero()[0].tolist()))
            count = f"{int(missing.sum())} of {missing.numel()} elements"
            problems.append(f"{name}: {count} were never stored, {name}[{first}] first")
    for memory in (memory for memory in allocated if memory.stored_outside):
        unnamed = f"a tensor of shape {tuple(memory.tensor.shape)}"
        outside.append(next((name for name, t in results.items() if memory.holds(t)), unnamed))
        problems.append(f"something was stored outside of {outside[-1]}: {memory.where_outside()}")
    if problems:
        reject(f"{what and f'{what}: '}{'; '.join(problems)}: {ask(unwritten, outside)}")


def reject_refused(what: str, error: str) -> None:
    """Reject a launch that the compiler refuses, in the compiler's own words: the last of them."""
    lines = [line[:300] for line in error.strip().splitlines()]
    reject("\n".join([f"right when interpreted, but the compiler refuses {what}:", *lines[-12:]]))


@contextlib.contextmanager
def explained_in(section: str) -> Iterator[None]:
    """Inside, what rejects an answer points to this section of the chapter, "3.1", and not to the exercise's own.
    Where they are nested, the inner one counts."""
    try:
        yield
    except (Rejected, VerificationError) as wrong:
        wrong.section = getattr(wrong, "section", section)
        raise


@contextlib.contextmanager
def after(right: str) -> Iterator[None]:
    """Inside, where a part of the answer is still to be written, the message begins with what is right already."""
    try:
        yield
    except BaseException as error:
        if errors.is_stub(errors.root_of(error)):
            errors.root_of(error).add_note(f"right so far: {right}. Next: ")
        raise
