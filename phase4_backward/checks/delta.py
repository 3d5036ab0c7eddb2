"""Checks both formulas in fp64, and the kernel for dtypes, strides, the term dlse and what it stores."""

import functools
import itertools

from common import make_qkv, make_tensor, runtime
from common.learn.check.require import counted, reject, require, require_stored
from common.verify import guard
from common.verify.expected import E
from phase4_backward.checks import roomy

import torch
from torch.overrides import TorchFunctionMode

SHAPE, ROWS = (2, 3, 37), 6 * 37  # of delta in the kernel's checks


def check(answer):
    _check_formulas(answer)
    _check_leading_axes(answer)
    for dtype, layout in ((torch.float16, "contiguous"), *itertools.product(runtime.DTYPES, ("transposed", "sliced"))):
        _check_delta_kernel(answer, dtype, 40, layout, with_dlse=layout == "transposed")
    _check_delta_kernel(answer, torch.float16, 64, "a sum's", with_dlse=False)
    return "both formulas in fp64; the kernel in fp16, bf16, fp32, dO transposed, sliced, with stride 0; less dlse"


def _check_formulas(answer):
    q, k, v = (t.double() for t in make_qkv(2, 3, 7, 5, seq_k=11, dtype=torch.float32))
    # Its rows do not sum to 1: delta_over_keys needs p.
    p, do = torch.softmax(q @ k.mT, dim=-1) + 0.1, q.flip(-1)
    dp = do @ v.mT
    mean = "this is the mean; wanted is the sum"
    mistakes = {"P is missing: the sum is over P * dP": dp.sum(-1), mean: (p * dp).mean(-1)}
    with _NoPV(p, v):
        over_keys = answer.delta_over_keys(p, do, v)
    _require_fp64("delta_over_keys", over_keys, (p * dp).sum(-1), mistakes)
    right, mistakes = (do * q).sum(-1), {mean: (do * q).mean(-1)}
    _require_fp64("delta_over_head_dim", answer.delta_over_head_dim(q, do), right, mistakes)


class _NoPV(TorchFunctionMode):
    """Rejects a product of P and V: it gives O, and with it the other formula."""

    def __init__(self, p, v):
        super().__init__()
        self.shape = *p.shape[:-1], v.shape[-1]

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        product = function.__name__.strip("_") in ("matmul", "rmatmul", "bmm", "einsum")
        if product and result.shape == self.shape:
            through = "this goes through P V, which is O, so it is the sum over head_dim: wanted is P * dP"
            reject(f"delta_over_keys: {through}")
        return result


def _require_fp64(what, actual, right, mistakes):
    if isinstance(actual, torch.Tensor) and actual.shape == right.shape:
        error = (actual.double() - right).abs().max().item()
        if 1e-10 < error < 1e-4:
            reject(f"{what}: computed in fp32 (off by {error:.0e}), the inputs are fp64: stay in their dtype")
    require(what, actual, right, rtol=1e-12, atol=1e-12, mistakes=mistakes)


def _check_leading_axes(answer):
    for lead in ((), (2, 1, 3)):
        p, do, v, o = (torch.ones(*lead, *sizes, dtype=torch.float64) for sizes in ((7, 11), (7, 5), (11, 5), (7, 5)))
        ones = torch.ones(*lead, 7, dtype=torch.float64)
        asked = (("delta_over_keys", (p, do, v), 55 * ones), ("delta_over_head_dim", (o, do), 5 * ones))
        for what, given, right in asked:
            try:
                actual = getattr(answer, what)(*given)
            except (IndexError, RuntimeError) as error:
                reject(f"{what}: with {len(lead)} leading axes it raises {error}. Count axes from the end: dim=-1, .mT")
            require(f"{what}, {len(lead)} leading axes", actual, right, rtol=1e-12, atol=1e-12)


def _check_delta_kernel(answer, dtype, head_dim, layout, *, with_dlse):
    what = f"delta, {str(dtype).removeprefix('torch.')}, head_dim {head_dim}, dO in {layout} memory"
    what += ", with dlse" if with_dlse else ""
    o, do, dlse = _inputs(dtype, head_dim, layout, with_dlse)
    with guard.watched() as allocated:
        delta = torch.empty(SHAPE, device=o.device)
    kernel_o, kernel_do = runtime.to_kernel_dtype(o, do)
    with runtime.on_device_of(o), counted() as moved:
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
    head_0, others = good(slice(None), 0), good(slice(None), slice(1, 3))
    signs = {
        "batch 0 is right, batch 1 is not: b * stride_o[0], b * stride_do[0]?": good(0) and not good(1),
        "head 0 is right, the others are not: h * stride_o[1], h * stride_do[1], dlse of this head?": (
            head_0 and not others
        ),
        "NaN came in from outside: both loads need a mask, of rows < seq_q and columns offs_d < HEAD_DIM": (
            delta.isnan().any()
        ),
    }
    require(what, delta, right, **exact, mistakes=mistakes, signs=signs)
    most = 2 * ROWS * head_dim * kernel_o.element_size() + (4 * ROWS if with_dlse else 0)
    if moved and moved.loaded > most:
        reject(f"{what}: {moved.loaded} bytes are loaded, there are {most}: mask the rows past seq_q in the loads too")


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
    strides_of_o = (do.mT.reshape(o.shape) * o).sum(-1) - less
    mistakes = {
        "every head has the delta of head 0: are both pointers moved to batch b and head h?": of_head_0,
        "do is read with the strides of o: it has four of its own": strides_of_o,
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
