"""Checks the kernel for dtypes, strides, the term dlse and what it stores."""

import contextlib
import functools
import itertools

from common import make_tensor, runtime
from common.learn.check import errors
from common.learn.check.require import counted, misread, reject, require, require_stored
from common.verify import guard
from common.verify.expected import E
from phase4_backward.checks import roomy

import torch

SHAPE, ROWS = (2, 3, 37), 6 * 37  # of delta in the kernel's checks


def check(answer):
    for dtype, layout in ((torch.float16, "contiguous"), *itertools.product(runtime.DTYPES, ("transposed", "sliced"))):
        _check_delta_kernel(answer, dtype, 40, layout, with_dlse=layout == "transposed")
    _check_delta_kernel(answer, torch.float16, 64, "a sum's", with_dlse=False)
    return "the kernel in fp16, bf16, fp32, dO transposed, sliced, with stride 0; less dlse"


def _check_delta_kernel(answer, dtype, head_dim, layout, *, with_dlse):
    what = f"delta, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}, dO in {layout} memory"
    what += ", with dlse" if with_dlse else ""
    o, do, dlse = _inputs(dtype, head_dim, layout, with_dlse)
    with guard.watched() as allocated:
        delta = torch.empty(SHAPE, device=o.device)
    kernel_o, kernel_do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o), counted() as moved, _none_is_named(what, dlse):
        answer._delta_kernel[(2 * 6,)](
            kernel_o, kernel_do, dlse, delta, kernel_o.stride(), kernel_do.stride(), 3, 37,
            HEAD_DIM=head_dim, BLOCK_D=64, BLOCK_M=32,
        )  # fmt: skip
    right, size, mistakes = _right_and_mistakes(o, do, dlse, overread=layout == "contiguous")
    # fp32: at most one rounding for each of the terms.
    exact = dict(rtol=0, atol=(head_dim + 2) * E * size)

    def good(*part):
        return torch.allclose(delta[part].double(), right[part], **exact)

    def ask(unwritten, outside):
        if good(0, 0) and guard.never_stored(delta[0, 1]).all():
            return "head 0 is right, head 1 is never stored: delta_ptr is that of this head already"
        return "does the store have a mask?" if outside else "does every program store all its rows?"

    require_stored(dict(delta=delta), allocated, ask, what)
    first, finds = good(0, 0), "`head_base(x_ptr, stride_x, pid_bh, heads)` finds a head of a tensor x"
    signs = {
        "batch 0 is right, batch 1 is not: b * stride_o[0], b * stride_do[0]?": good(0) and not good(1),
        "head 0 is right, the others are not: h * stride_o[1], h * stride_do[1], dlse of this head?": (
            good(slice(None), 0) and not good(slice(None), slice(1, 3))
        ),
        f"head 0 of batch 0 is right, other heads are not: {finds}": first and not good(),
        f"its first 32 rows are right, its next are not: {finds}; is it found by pid_bh?": (
            good(0, 0, slice(32)) and not first
        ),
        "NaN came in from outside: both loads need a mask, of rows < seq_q and columns offs_d < HEAD_DIM": (
            delta.isnan().any()
        ),
        "the sum is rounded to 16 bits: convert o and do to fp32 first": torch.equal(delta, delta.to(dtype).float()),
    }
    require(what, delta, right, **exact, mistakes=mistakes, signs=signs)
    most = 2 * ROWS * head_dim * kernel_o.element_size() + (4 * ROWS if with_dlse else 0)
    if moved and moved.loaded > most:
        reject(f"{what}: {moved.loaded} bytes are loaded, there are {most}: mask the rows past seq_q in the loads too")


@contextlib.contextmanager
def _none_is_named(what, dlse):
    """Inside, a load from a dlse_ptr that is None is named."""
    try:
        yield
    except Exception as error:
        if dlse is None and "NoneType" in str(errors.root_of(error)):
            reject(f"{what}: dlse_ptr is None here: load from it under `if dlse_ptr is not None:` alone")
        raise


def _inputs(dtype, head_dim, layout, with_dlse):
    """o, do, dlse or None. Contiguous ones have finite numbers behind the last row."""
    new = functools.partial(make_tensor, dtype=dtype, generator=torch.Generator().manual_seed(0))
    shape = *SHAPE, head_dim
    o, do = (new((2, 3, 40, head_dim)).flatten()[: ROWS * head_dim].view(shape) for _ in range(2))
    if layout != "contiguous":
        o = new(shape, poison=layout == "sliced")
        do = o.new_ones(()).expand(shape) if layout == "a sum's" else new(shape, layout=layout)
    return o, do, roomy(new((1, *SHAPE), dtype=torch.float32)[0]) if with_dlse else None


def _right_and_mistakes(o, do, dlse, *, overread):
    """delta in fp64, the largest sum of its terms' sizes, {sentence: delta with that mistake}.

    overread: what lies behind a row is a finite number, up to column 64.
    """
    rounded = (do * o).double().sum(-1)
    wide = [t.as_strided((*SHAPE, 64), t.stride()).double() for t in (o, do) if overread]
    o, do = o.double(), do.double()
    product = (do * o).sum(-1)
    less = torch.zeros_like(product) if dlse is None else dlse.double()
    right = product - less
    size = ((do * o).abs().sum(-1).max() + less.abs().max()).item()
    of_head_0 = right[:1, :1].expand(SHAPE)
    between = misread(do, o)[" between heads"]
    strides_of_o = (do.mT.reshape(o.shape) * o).sum(-1) - less
    mistakes = {
        "every head has the delta of head 0: are both pointers moved to batch b and head h?": of_head_0,
        "do is read with the strides of o: it has four of its own": strides_of_o,
        "the heads of do are found with the strides of o": (between * o).sum(-1) - less,
        "the products are rounded before they are summed: convert o and do to fp32 first": rounded - less,
    }
    if overread:
        mistakes["columns past head_dim are in the sum: mask offs_d < HEAD_DIM"] = (wide[0] * wide[1]).sum(-1)
    if dlse is not None:
        of_head_0 = product - less[:1, :1]
        mistakes |= {
            "dlse is not subtracted: what dS needs is delta - dlse": product,
            "dlse is added: what dS needs is delta - dlse": product + less,
            "every head subtracts the dlse of head 0: dlse_ptr + pid_bh * seq_q": of_head_0,
        }
    return right, size, mistakes
