"""verify_results: may a correct kernel return this result?

A fixed tolerance cannot tell. Rounding P to bf16 costs a correct kernel 1e-2 on one input and 1e-5 on another; a
tolerance wide enough for the first lets wrong kernels through on the second. So the harness predicts, for every single
element, how far a *correct* kernel may stray, and counts the error in units of that prediction:

    z = |actual - truth| / sigma            pass when the largest z of a tensor is at most 6

truth   SDPA (math backend) in fp64 on the same, already rounded inputs; gradients by its autograd.
sigma   the standard deviation of independent roundings: P and dS to the input dtype before they enter
        a product (u), exp and the logits in fp32 (rho), the fp32 sums (sum_error), the result itself
        (u again), the smallest step of the dtype near zero (h), and P so small that exp flushes it to
        zero.

How to read z. The errors of a correct kernel behave like noise of size sigma: most elements have z below 1, and the
worst of some thousands lies between 1 and 4. So z = 2.9 says "as good as rounding allows". Inputs that are all positive
let errors line up and push the worst towards 6. A mistake of logic moves elements by thousands to millions of sigma.

Mistakes of precision are harder to see. One bf16 element that is 2 % off passes at z = 5.1, and P rounded to 9 bits
instead of fp16's 11 passes for most seeds (39 of 40 with 40 queries and 100 keys). Beside the largest z stands rms_z,
the root mean square of z over the tensor: 0.3 to 1 for a correct kernel in 16 bits (0.1 in fp32, where rho is
cautious), and half as much again where P has lost a bit.

Roundings count as independent, but for the errors of O in dk. Rows of q that are equal, or nearly, round alike, and
their errors add up in dk and dv: 46 equal queries with P near 1e-24 gave a right kernel in fp32 a z of 6.6. So do equal
rows of do: in fp32, 128 equal terms gave dv a z of 7.5; in bf16, with weights that were equal too, equal dS gave dk a z
of 7.

rho grows with the logits, as their fp32 sums do. At logits of 1e4 and more the harness excuses errors ten times those
of a careful kernel. In the millions a logit's rounding exceeds 1, and any gradient is excused: zeros pass.
"""

import math
from dataclasses import dataclass, field

from common.validate import check_scale
from common.verify.expected import UNIT_ROUNDOFF, expected, expected_softmax
from common.verify.mistakes import diagnose

import torch
import torch.nn.functional as F

Z_MAX = 6.0


class VerificationError(AssertionError):
    """A tensor is not what a correct kernel may return. The message says where, by how much, and what to look at."""


@dataclass(frozen=True)
class TensorResult:
    """The verdict on one tensor: the worst element, in units of the rounding error that a correct kernel makes."""

    name: str
    dtype: torch.dtype
    z: float  # NaN when the tensor could not be compared, see `problem`
    passed: bool
    index: tuple[int, ...] = ()
    actual: float = math.nan
    truth: float = math.nan
    sigma: float = math.nan
    # The same measure for PyTorch's SDPA in this dtype, where it returns such a tensor.
    sdpa_z: float | None = None
    # Wrong shape, wrong dtype, or a non-finite element where the truth has none.
    problem: str | None = None
    hint: str | None = None
    rms_z: float = math.nan  # root mean square of z over the tensor

    def __str__(self):
        line = f"{self.name:<4}{'PASS' if self.passed else 'FAIL'}  "
        line += self.problem or f"z = {self.z:.3g} (limit {Z_MAX:g}, rms {self.rms_z:.2g})"
        if self.index:
            at = ", ".join(map(str, self.index))
            line += f"  worst at [{at}]: {self.actual:.6g}, truth {self.truth:.6g}, sigma {self.sigma:.1e}"
        if self.sdpa_z is not None:
            line += f"  [SDPA in {str(self.dtype).removeprefix('torch.')}: z = {self.sdpa_z:.3g}]"
        return line


@dataclass(frozen=True)
class Report:
    """All tensors of one comparison. `passed`, `z` (the worst), `report["dq"]`; printing gives a line a tensor."""

    case: str
    results: tuple[TensorResult, ...] = field(default_factory=tuple)

    @property
    def passed(self) -> bool:
        return all(r.passed for r in self.results)

    # So that `assert verify_results(...)` means what it says.
    def __bool__(self) -> bool:
        return self.passed

    @property
    def z(self) -> float:
        """The largest z; NaN if any tensor could not be compared."""
        return next((r.z for r in self.results if r.z != r.z), max((r.z for r in self.results), default=0.0))

    @property
    def verdict(self) -> str:
        """ "o PASS, lse FAIL": without numbers, so that it is the same on every machine."""
        return ", ".join(f"{r.name} {'PASS' if r.passed else 'FAIL'}" for r in self.results)

    def __getitem__(self, name: str) -> TensorResult:
        return {r.name: r for r in self.results}[name]

    def __str__(self):
        return "\n".join([self.case, *(f"  {r}" for r in self.results)])

    __repr__ = __str__

    @property
    def hint(self) -> str | None:
        """What the errors of the first wrong tensor look like (those after it often only follow from it)."""
        return next((r.hint for r in self.results if not r.passed), None)

    def check(self) -> "Report":
        """Return self if everything passed, else raise VerificationError with the worst element and a hint."""
        if not self.passed:
            raise VerificationError(f"{self}\n  hint: {self.hint}" if self.hint else str(self))
        return self


def verify_results(fn, q, k, v, *, do=None, is_causal=False, scale=None, enable_gqa=False, compare_sdpa=True) -> Report:
    """Hold `fn` against SDPA in fp64, element by element (see the module's docstring).

    fn            called as fn(q, k, v, is_causal=, scale=, enable_gqa=); returns o, or (o, lse) with lse in fp32
    q, k, v       (batch, heads, seq, head_dim), fp16, bf16 or fp32; or (seq, head_dim) for a single head
    do            gradient of o: when given, dq, dk, dv from o.backward(do) are checked too
    compare_sdpa  also run PyTorch's SDPA in the same dtype, to print its z beside ours

    Returns a Report; `.check()` raises VerificationError if anything failed. Nothing is printed. Above 4096 keys o and
    lse are compared on 256 query rows (the first, the last, and random ones between), gradients always on all. An input
    that fn wrote into is a failure of its own, and the truth is that of the inputs as they were.
    """
    _check_arguments(fn, q, k, v, do, is_causal, enable_gqa)
    true_scale = check_scale(scale, q.shape[-1])
    _check_gradients(q, k, v, do)
    kwargs = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    inputs = {name: t.detach() for name, t in dict(q=q, k=k, v=v, do=do).items() if t is not None}
    before = {name: t.clone() for name, t in inputs.items()}
    got = run_attention(fn, q, k, v, do, kwargs)
    results = _written_inputs(inputs, before)
    q, k, v, do = map(before.get, ("q", "k", "v", "do"))  # fn may have resized what it was given
    lead = (1,) * (4 - q.dim())
    q4, k4, v4 = (t.detach().reshape(lead + t.shape) for t in (q, k, v))
    do4 = None if do is None else do.reshape(lead + do.shape)
    wanted = expected(q4, k4, v4, do4, is_causal, true_scale)
    sdpa = {}
    if compare_sdpa and q.numel() > 0:
        # On fresh copies: torch 2.11's fused backends read rows at odd addresses wrongly, or stop the GPU over them.
        copies = (t.clone(memory_format=torch.contiguous_format) for t in (q4, k4, v4))
        do_copy = None if do is None else do4.clone(memory_format=torch.contiguous_format)
        kwargs["scale"] = None if scale is None else true_scale  # SDPA takes no Fraction
        sdpa = run_attention(F.scaled_dot_product_attention, *copies, do_copy, kwargs)

    context = diagnose.Context(q4, k4, v4, do4, is_causal, true_scale)
    shapes = dict(o=q.shape, lse=q.shape[:-1], dq=q.shape, dk=k.shape, dv=v.shape)
    for name, actual in got.items():
        dtype = torch.float32 if name == "lse" else q.dtype
        problem = _wrong_kind(name, actual, shapes[name], dtype, q.device)
        if problem:
            results.append(TensorResult(name, dtype, math.nan, False, problem=problem))
            continue
        actual4 = actual.detach().reshape(lead + actual.shape)
        sdpa_z = _compare(name, sdpa[name], wanted[name], dtype, None).z if name in sdpa else None
        results.append(_compare(name, actual4, wanted[name], dtype, context, drop=len(lead), sdpa_z=sdpa_z))
    sizes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {str(q.dtype).removeprefix('torch.')}"
    flags = "".join(f", {n}" for n, on in (("causal", is_causal), (f"scale={scale}", scale is not None)) if on)
    return Report(sizes + flags, tuple(results))


def verify_softmax(fn, x, *, kind="softmax") -> Report:
    """Hold fn(x) = softmax over the last axis (or, with kind="logsumexp", its logarithmic norm) against the truth.

    x: (..., n), fp16, bf16 or fp32. The truth for a softmax is SDPA as well, in fp64: with K = V = identity and scale =
    1, S = X and O = P. Rows longer than 4096 use torch.softmax in fp64, as the identity would fill the memory. A row of
    -inf alone has softmax 0 and logsumexp -inf, as attention wants it (torch.softmax returns NaN).

    The rounding of the row's sum is left out: in fp32, a right kernel may be rejected in rows of more than 1e5 equal
    logits.
    """
    if not callable(fn):
        raise TypeError(f"fn: expected a function of x, got {type(fn).__name__}")
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"x: expected a torch.Tensor, got {type(x).__name__}")
    if kind not in ("softmax", "logsumexp") or x.dtype not in UNIT_ROUNDOFF:
        raise ValueError(f'expected kind "softmax" or "logsumexp" and x in fp16, bf16 or fp32, got {kind!r}, {x.dtype}')
    if x.dim() == 0 or x.layout != torch.strided or x.is_meta:
        raise ValueError(f"x: expected a dense tensor of 1 dimension or more, got {_described(x)}")
    inputs, before = {"x": x.detach()}, x.detach().clone()
    actual = fn(x)
    written = _written_inputs(inputs, {"x": before})
    x = before
    name, dtype = ("p", x.dtype) if kind == "softmax" else ("lse", torch.float32)
    wanted = expected_softmax(x, kind)
    shape = wanted.truth.shape
    problem = _wrong_kind(name, actual, shape, dtype, x.device)
    if problem:
        result = TensorResult(name, dtype, math.nan, False, problem=problem)
    else:
        result = _compare(name, actual, wanted, dtype, None)
    return Report(f"x {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}", (*written, result))


def _check_arguments(fn, q, k, v, do, is_causal, enable_gqa) -> None:
    if not callable(fn):
        raise TypeError(f"fn: expected a function of q, k, v, is_causal, scale, enable_gqa, got {type(fn).__name__}")
    tensors = dict(q=q, k=k, v=v) | ({} if do is None else dict(do=do))
    for name, t in tensors.items():
        if not isinstance(t, torch.Tensor):
            raise TypeError(f"{name}: expected a torch.Tensor, got {type(t).__name__}")
        if t.layout != torch.strided or t.is_nested or t.is_meta:
            raise TypeError(f"{name}: expected a dense tensor with memory, got {_described(t)}")
    _check_shapes(q, k, v)
    if do is not None and (do.shape != q.shape or do.dtype != q.dtype):
        raise ValueError(f"do: expected {tuple(q.shape)}, {q.dtype} like q, got {tuple(do.shape)}, {do.dtype}")
    for name, t in tensors.items():
        if t.device != q.device:
            raise ValueError(f"{name}: expected device {q.device} like q, got {t.device}")
    for name, flag in (("is_causal", is_causal), ("enable_gqa", enable_gqa)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name}: expected a bool, got {type(flag).__name__}")


def _check_shapes(q, k, v) -> None:
    if q.dtype not in UNIT_ROUNDOFF or not 2 <= q.dim() <= 4:
        raise ValueError(f"q: expected 2 to 4 dimensions in fp16, bf16 or fp32, got {tuple(q.shape)}, {q.dtype}")
    for name, t in (("k", k), ("v", v)):
        if t.dtype != q.dtype or t.dim() != q.dim():
            wanted = f"{q.dim()} dimensions in {q.dtype} like q"
            raise ValueError(f"{name}: expected {wanted}, got {tuple(t.shape)}, {t.dtype}")
    if q.shape[-1] == 0:
        raise ValueError(f"q: expected head_dim from 1 upwards, got {_described(q)}")
    if k.shape[:-3] != q.shape[:-3] or k.shape[-1] != q.shape[-1] or not _shared_heads(q, k):
        wanted = f"batch and head_dim as q's {tuple(q.shape)}, and heads that divide q's"
        raise ValueError(f"k: expected {wanted}, got {_described(k)}")
    if v.shape != k.shape:
        raise ValueError(f"v: expected {tuple(k.shape)} like k, got {_described(v)}")


def _check_gradients(q, k, v, do) -> None:
    """Raise where PyTorch would give none."""
    if do is None:
        return
    if torch.is_inference_mode_enabled():
        raise RuntimeError("do: there are no gradients inside torch.inference_mode(); call outside it, or without do")
    for name, t in dict(q=q, k=k, v=v).items():
        if t.is_inference():
            raise RuntimeError(f"{name}: a tensor made inside torch.inference_mode() has no gradient; pass its clone()")


def _shared_heads(q, k) -> bool:
    """Every query head has a key head; 2-D tensors are one head each."""
    if q.dim() == 2 or q.shape[-3] == k.shape[-3]:
        return True
    return k.shape[-3] > 0 and q.shape[-3] % k.shape[-3] == 0


def _described(t) -> str:
    layout = "a nested tensor" if t.is_nested else f"shape {tuple(t.shape)}, {t.layout}"
    return f"{layout}, {t.dtype}, {t.device}"


# --- running and comparing ----------------------------------------------------------------------------------------


def run_attention(fn, q, k, v, do, kwargs) -> dict[str, torch.Tensor]:
    """Call fn and name what it returns; with do, run its backward pass on fresh leaves of the same layout."""
    if do is None:
        with torch.no_grad():
            out = fn(q, k, v, **kwargs)
    else:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            out = fn(q, k, v, **kwargs)
    if isinstance(out, tuple) and len(out) != 2:
        raise TypeError(f"fn: expected o or (o, lse), got a tuple of {len(out)}")
    got = dict(zip(("o", "lse"), out, strict=True)) if isinstance(out, tuple) else {"o": out}
    if do is not None and not _wrong_kind("o", got["o"], q.shape, q.dtype, q.device):
        reached = got["o"].requires_grad
        grads = torch.autograd.grad(got["o"], (q, k, v), do, allow_unused=True) if reached else (None, None, None)
        got |= zip(("dq", "dk", "dv"), grads, strict=True)
    return got


def _written_inputs(inputs, before) -> list[TensorResult]:
    """A failed result for every input that is no longer what it was."""
    hint = "only results may be written: are the pointers of an input and an output swapped, is an operation in place?"
    return [
        TensorResult(name, t.dtype, math.nan, False, problem="fn wrote into this input", hint=hint)
        for name, t in inputs.items()
        if not torch.allclose(t, before[name], rtol=0, atol=0, equal_nan=True)
    ]


def _wrong_kind(name, actual, shape, dtype, device) -> str | None:
    if actual is None and name in ("dq", "dk", "dv"):
        return "no gradient arrives: is the input used, and every step on the way differentiable?"
    if not isinstance(actual, torch.Tensor):
        return f"expected a tensor, got {type(actual).__name__}"
    if actual.layout != torch.strided or actual.is_nested:
        return "expected a dense tensor, got " + _described(actual)
    if actual.shape != shape:
        return f"expected shape {tuple(shape)}, got {tuple(actual.shape)}"
    if actual.dtype != dtype:
        return f"expected {dtype}, got {actual.dtype}"
    if actual.device != device:
        return f"expected device {device}, got {actual.device}"
    return None


def _compare(name, actual, expected, dtype, context, *, drop=0, sdpa_z=None) -> TensorResult:
    """The worst element of one tensor. `drop` leading axes of length 1 are left out of the index shown."""
    rows = expected.rows
    actual = actual.detach().double()
    if rows is not None:
        actual = actual.index_select(2, rows)
    if actual.numel() == 0:
        return TensorResult(name, dtype, 0.0, True, sdpa_z=sdpa_z, rms_z=0.0)
    truth, sigma = expected.truth, expected.sigma
    same = (actual == truth) | (actual.isnan() & truth.isnan())
    if name == "lse":  # a logit of +inf: inf in the limit, NaN as computed, like its row of o
        same |= actual.isnan() & (truth == torch.inf)
    z = torch.where(same, 0.0, (actual - truth).abs() / sigma)
    # A non-finite element out of place has z = inf.
    z = torch.where(same | (actual.isfinite() & truth.isfinite()), z, torch.inf)
    flat = int(torch.where(z.isnan(), torch.inf, z).argmax())
    at = [int(i) for i in torch.unravel_index(torch.tensor(flat), z.shape)]
    worst = z.flatten()[flat].item()
    passed = worst <= Z_MAX  # False for NaN
    problem = None
    if not passed and not (actual.isfinite() == truth.isfinite()).all():
        out_of_place = int((actual.isfinite() != truth.isfinite()).sum())
        problem = f"{out_of_place} elements are non-finite in one of result and truth"
    hint = None if passed or context is None else diagnose.hint(name, actual, truth, ~(z <= Z_MAX), context, rows)
    values = (t.flatten()[flat].item() for t in (actual, truth, sigma))
    rms_z = z.square().mean().sqrt().item()
    if rows is not None:
        at[2] = int(rows[at[2]])
    return TensorResult(name, dtype, worst, passed, tuple(at[drop:]), *values, sdpa_z, problem, hint, rms_z)
