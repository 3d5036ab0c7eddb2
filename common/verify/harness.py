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

Gradients of peaked inputs show it best. Logits near 20 that are rounded to fp16, or an LSE, or k * scale * log2(e),
move P by up to 1 %, and the gradients are 3 to 16 times as far off as a correct kernel's: rms_z is 1.4 to 6.6 where
SDPA's is 0.4, and z 7 to 30. Half of the squared error of dq lies in 5 % of its rows. That dq is off by no more than
where S, P, dP and dS are all kept in fp16 is no excuse: z is 15 to 40 there.

Roundings count as independent, but for the errors of O in dk. Rows of q that are equal, or nearly, round alike, and
their errors add up in dk and dv: 46 equal queries with P near 1e-24 gave a right kernel in fp32 a z of 6.6. So do equal
rows of do: in fp32, 128 equal terms gave dv a z of 7.5; in bf16, with weights that were equal too, equal dS gave dk a z
of 7.

judging.ipynb beside this file derives sigma, rounding by rounding.

rho grows with the logits, as their fp32 sums do. At logits of 1e4 and more the harness excuses errors ten times those
of a careful kernel. In the millions a logit's rounding exceeds 1, and any gradient is excused: zeros pass.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

from common.validate import check_flag, check_scale
from common.verify import guard
from common.verify.expected import UNIT_ROUNDOFF, expected, expected_softmax
from common.verify.foreign import interpretable
from common.verify.isolated import note
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
    # Wrong shape or dtype, never stored, or non-finite where the truth is not.
    problem: str | None = None
    hint: str | None = None
    rms_z: float = math.nan  # root mean square of z over the tensor
    # Between two calls with the same inputs, the largest difference in units of sigma; 0: the same bits.
    varies: float = 0.0

    def __str__(self):
        line = f"{self.name:<4}{'PASS' if self.passed else 'FAIL'}  "
        z = "" if math.isnan(self.z) else f"z = {self.z:.3g} (limit {Z_MAX:g}, rms {self.rms_z:.2g})"
        line += "; ".join(filter(None, (self.problem, z)))
        if self.varies:
            line += f"  two calls differ by {self.varies:.2g} sigma"
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
    results: tuple[TensorResult, ...]
    notes: tuple[str, ...] = ()  # what differs from a run on a GPU

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
        return "\n".join([self.case, *(f"  {line}" for line in (*self.notes, *self.results))])

    __repr__ = __str__

    @property
    def hint(self) -> str | None:
        """What the errors of the first wrong tensor look like whose hint names anything, or of the first.

        Those after it often only follow from it.
        """
        hints = [r.hint for r in self.results if not r.passed]
        return next(filter(diagnose.names_something, hints), next(iter(hints), None))

    def check(self) -> "Report":
        """Return self if everything passed, else raise VerificationError with the worst element and a hint."""
        if not self.passed:
            raise VerificationError(f"{self}\n  hint: {self.hint}" if self.hint else str(self))
        return self


def verify_results(
    fn, q, k, v, *, do=None, is_causal=False, scale=None, enable_gqa=False, compare_sdpa=True, in_e4m3=None
) -> Report:  # fmt: skip
    """Hold `fn` against SDPA in fp64, element by element (see the module's docstring).

    fn            called as fn(q, k, v, is_causal=, scale=, enable_gqa=); returns o, or (o, lse) with lse in fp32
    q, k, v       (batch, heads, seq, head_dim), fp16, bf16 or fp32; or (seq, head_dim) for a single head
    do            gradient of o: when given, dq, dk, dv from o.backward(do) are checked too
    compare_sdpa  also run PyTorch's SDPA in the same dtype, to print its z beside ours
    in_e4m3       (q, k, v) in fp64 as fn rounds them to e4m3, and may have rotated q and k: the truth is of these, and
                  sigma is that of a kernel which multiplies in e4m3

    Returns a Report; `.check()` raises VerificationError if anything failed. Nothing is printed. Without do, o and lse
    are compared above 4096 keys on 256 query rows: the first, the last, and random ones between.

    fn is called twice, with copies of the inputs that have their strides. NaN lies around the copies and between their
    rows, and fills what fn allocates. So an element that is never stored fails, a store outside of a result or into an
    input fails, and what is loaded from beside an input fails where it reaches a result. Where the two calls differ,
    the worse is shown, and by how much they do.

    A function of another form wants an adapter:
        lambda q, k, v, is_causal, **_: F.apply(q, k, v, is_causal)                      an autograd.Function F
        lambda q, k, v, **_: f(*(t.transpose(1, 2) for t in (q, k, v))).transpose(1, 2)  (batch, seq, heads, head_dim)
        lambda q, k, v, **_: f(*(t.flatten(0, 1) for t in (q, k, v))).view(q.shape)      (batch * heads, seq, head_dim)
    """
    _check_arguments(fn, q, k, v, do, is_causal, enable_gqa)
    true_scale = check_scale(scale, q.shape[-1])
    _check_gradients(q, k, v, do, in_e4m3)
    options = dict(is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    flags = "".join(f", {n}" for n, on in (("causal", is_causal), (f"scale={scale}", scale is not None)) if on)
    case = f"q {tuple(q.shape)}, k {tuple(k.shape)}, {str(q.dtype).removeprefix('torch.')}{flags}"

    def context(inputs):
        q, k, v, *do = (_with_axes(t, 4) for t in inputs.values())
        return diagnose.Context(q, k, v, do[0] if do else None, is_causal, true_scale)

    inputs = {name: t.detach() for name, t in dict(q=q, k=k, v=v, do=do).items() if t is not None}
    given = context(inputs)
    wanted = expected(given.q, given.k, given.v, given.do, is_causal, true_scale, in_e4m3)
    shapes = dict(o=q.shape, lse=q.shape[:-1], dq=q.shape, dk=k.shape, dv=v.shape)
    kinds = {name: (shape, torch.float32 if name == "lse" else q.dtype) for name, shape in shapes.items()}
    trial = _Trial(partial(run_attention, fn, kwargs=options), inputs, wanted, kinds, case, context)
    results = trial.results()
    if compare_sdpa and q.numel() > 0 and in_e4m3 is None:  # SDPA reads what is not rounded
        # On fresh copies: torch 2.11's fused backends read rows at odd addresses wrongly, or stop the GPU over them.
        copies = [t if t is None else t.contiguous().clone() for t in (given.q, given.k, given.v, given.do)]
        scale = None if scale is None else true_scale  # SDPA takes no Fraction
        options |= dict(scale=scale, enable_gqa=given.q.shape[1] != given.k.shape[1])
        sdpa = run_attention(F.scaled_dot_product_attention, *copies, options)
        z = {name: _compare(name, t, wanted[name], q.dtype, None).z for name, t in sdpa.items()}
        results = [replace(r, sdpa_z=z.get(r.name)) for r in results]
    return Report(case, tuple(results), trial.notes)


def verify_softmax(fn, x, *, kind="softmax") -> Report:
    """Hold fn(x) = softmax over the last axis (or, with kind="logsumexp", its logarithmic norm) against the truth.

    x: (..., n), fp16, bf16 or fp32. The truth for a softmax is SDPA as well, in fp64: with K = V = identity and scale =
    1, S = X and O = P. Rows longer than 4096 use torch.softmax in fp64, as the identity would fill the memory. A row of
    -inf alone has softmax 0 and logsumexp -inf, as attention wants it (torch.softmax returns NaN). fn is called as
    `verify_results` does.

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
    name, dtype = ("p", x.dtype) if kind == "softmax" else ("lse", torch.float32)
    wanted = expected_softmax(x.detach(), kind)
    kinds = {name: (wanted.truth.shape, dtype)}
    case = f"x {tuple(x.shape)}, {str(x.dtype).removeprefix('torch.')}"
    trial = _Trial(lambda x: {name: fn(x)}, {"x": x.detach()}, {name: wanted}, kinds, case)
    results = trial.results()
    return Report(case, tuple(results), trial.notes)


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
    check_flag("is_causal", is_causal)
    check_flag("enable_gqa", enable_gqa)


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


def _check_gradients(q, k, v, do, in_e4m3) -> None:
    """Raise where there are none to compare."""
    if do is None:
        return
    if in_e4m3 is not None:
        raise ValueError("do: expected None beside in_e4m3, whose sigma knows no gradients")
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

LEFT_OUT = "left out: from such an o there is no gradient"
NEVER_STORED = "has every row a program (a ceiling division in the grid), and does a store reach every element?"
STORED_OUTSIDE = (
    "is every store masked where its sequence and head_dim end, and is its base that of this tensor and head?"
)
DIFFERENT = (
    "two calls with the same inputs gave different results: do programs write to one place, is memory read before it "
    "is stored, or does a call leave something behind for the next?"
)
WRITTEN = "only results may be written: are the pointers of an input and an output swapped, is an operation in place?"


def run_attention(fn, q, k, v, do=None, kwargs=None) -> dict[str, torch.Tensor]:
    """Call fn and name what it returns; with do, run its backward pass on fresh leaves of the same layout."""
    if do is None:
        with torch.no_grad():
            out = fn(q, k, v, **(kwargs or {}))
    else:
        q, k, v = (t.detach().requires_grad_() for t in (q, k, v))
        with torch.enable_grad():
            out = fn(q, k, v, **(kwargs or {}))
    if isinstance(out, tuple) and len(out) != 2:
        raise TypeError(f"fn: expected o or (o, lse), got a tuple of {len(out)}")
    got = dict(zip(("o", "lse"), out, strict=True)) if isinstance(out, tuple) else {"o": out}
    if do is not None:
        o, _ = _fitted("o", got["o"], q.shape, q.dtype, q.device)
        grads = (LEFT_OUT if o is None else None,) * 3
        if o is not None and o.requires_grad:
            grads = torch.autograd.grad(o, (q, k, v), do.to(o.dtype), allow_unused=True)
        got |= zip(("dq", "dk", "dv"), grads, strict=True)
    return got


@dataclass(frozen=True)
class _Call:
    """What a function returned, by name, the copies that it was given, what it allocated, and what is to be said."""

    got: dict[str, object]
    inputs: dict[str, guard.Placed]
    allocated: list[guard.Result]
    notes: list[str]


class _Trial:
    """Calls of the function under test, fn(**inputs) -> results by name, and the verdicts on them.

    wanted: the truth of each result. kinds: its shape and dtype. case: the inputs in words. context(inputs): what hints
    are looked for in.
    """

    def __init__(self, fn, inputs, wanted, kinds, case, context=lambda inputs: None):
        self.fn, self.inputs, self.wanted, self.kinds = fn, inputs, wanted, kinds
        self.case, self.context = case, context
        self.calls = [self._call(), self._call()]
        self.notes = tuple(dict.fromkeys(self.calls[0].notes))

    def _call(self, spoiled=None) -> _Call:
        """Call fn with NaN around its inputs, or around those that are `spoiled` and zeros around the others."""
        around = {name: math.nan if spoiled is None or name in spoiled else 0.0 for name in self.inputs}
        copies = {name: guard.placed(t, around[name]) for name, t in self.inputs.items()}
        note(self.case)
        with guard.watched() as allocated, interpretable() as notes:
            got = self.fn(**{name: copy.tensor.detach() for name, copy in copies.items()})
        note("")
        return _Call(got, copies, allocated, notes)

    def results(self) -> list[TensorResult]:
        """Of the inputs that were written, of every tensor that was returned, and of what else was stored beside."""
        call, results = self.calls[0], []
        for name, copy in call.inputs.items():
            if copy.written:
                what = "wrote into" if copy.written_inside else "stored beside"
                results.append(_failed(name, copy.tensor, f"fn {what} this input", WRITTEN))
        results += map(self._result, call.got)
        for r in call.allocated:
            if r.stored_outside and not any(r.holds(t) for t in call.got.values()):
                problem = f"fn stored beside a tensor of {tuple(r.tensor.shape)}: {r.where_outside()}"
                results.append(_failed("memory", r.tensor, problem, STORED_OUTSIDE))
        return results

    def _result(self, name) -> TensorResult:
        """The worse of a tensor's two verdicts, with a hint if it failed."""
        same = _same_bits(*(call.got.get(name) for call in self.calls))
        judged = [(self._verdict(name, call), call) for call in (self.calls[:1] if same else self.calls)]
        result, call = max(judged, key=lambda of: (not of[0].passed, of[0].z))
        if not same:
            result = replace(result, varies=self._varies(name))
        if result.passed or result.hint:
            return result
        return replace(result, hint=DIFFERENT if result.varies > Z_MAX else self._hint(name, result, call))

    def _verdict(self, name, call, explained=False) -> TensorResult:
        """On a tensor of one call. explained: with a hint of what its errors look like."""
        (shape, dtype), wanted = self.kinds[name], self.wanted[name]
        device = next(iter(self.inputs.values())).device
        actual, problem = _fitted(name, call.got.get(name), shape, dtype, device)
        if actual is None:
            return TensorResult(name, dtype, math.nan, False, problem=problem)
        context = self.context({n: copy.tensor for n, copy in call.inputs.items()}) if explained else None
        lead = wanted.axes - actual.dim()
        result = _compare(name, _with_axes(actual, wanted.axes), wanted, dtype, context, drop=lead)
        hint = result.hint
        missing = guard.never_stored(actual)
        outside = [r for r in call.allocated if r.stored_outside and r.holds(actual)]
        if missing.any():
            at = ", ".join(map(str, missing.nonzero()[0].tolist()))
            problem = f"{int(missing.sum())} of {missing.numel()} elements were never stored, [{at}] first"
            hint = NEVER_STORED
        elif outside:
            problem, hint = f"fn stored outside of it: {outside[0].where_outside()}", STORED_OUTSIDE
        if not problem:
            return result
        return replace(result, passed=False, problem=problem, hint=hint)

    def _varies(self, name) -> float:
        """The largest difference between the two calls, in units of sigma; infinite where they cannot be compared."""
        wanted = self.wanted[name]
        pair = [call.got.get(name) for call in self.calls]
        if not all(isinstance(t, torch.Tensor) and t.shape == self.kinds[name][0] for t in pair):
            return math.inf
        first, second = (wanted.of_rows(_with_axes(t.detach(), wanted.axes).double()) for t in pair)
        same = (first == second) | (first.isnan() & second.isnan())
        return torch.where(same, 0.0, (first - second).abs() / wanted.sigma).nan_to_num(nan=math.inf).max().item()

    def _hint(self, name, result, call) -> str | None:
        """What the errors look like; where they are NaN or infinite, without what was loaded from beside the inputs."""
        hint = self._verdict(name, call, explained=True).hint
        if not math.isinf(result.z):
            return hint
        calm = self._call(spoiled=())
        if not self._verdict(name, calm).passed:
            return self._verdict(name, calm, explained=True).hint or hint
        spoil = [n for n in self.inputs if not self._verdict(name, self._call(spoiled=(n,))).passed]
        return (
            f"{name} is right where zeros lie around {' and '.join(spoil)}, and wrong where NaN does: loads from there "
            "must be masked with other=0, since 0 * NaN is NaN"
        )


def _failed(name, t, problem, hint) -> TensorResult:
    return TensorResult(name, t.dtype, math.nan, False, problem=problem, hint=hint)


def _with_axes(t, axes: int):
    return t.reshape((1,) * (axes - t.dim()) + t.shape)


def _same_bits(first, second) -> bool:
    pair = first, second
    if not all(isinstance(t, torch.Tensor) and t.layout == torch.strided and not t.is_meta for t in pair):
        return True  # what has no elements to compare fails as such
    alike = first.shape == second.shape and first.dtype == second.dtype
    return alike and torch.equal(*map(guard.bits, pair))


def _fitted(name, actual, shape, dtype, device) -> tuple[torch.Tensor | None, str | None]:
    """A result in the layout of the truth, None where it cannot be compared, and what is wrong with its kind."""
    if actual is None and name in ("dq", "dk", "dv"):
        return None, "no gradient arrives: is the input used, and every step on the way differentiable?"
    if actual is LEFT_OUT:
        return None, LEFT_OUT
    if not isinstance(actual, torch.Tensor):
        return None, f"expected a tensor, got {type(actual).__name__}"
    if actual.layout != torch.strided or actual.is_nested:
        return None, "expected a dense tensor, got " + _described(actual)
    if actual.device != device:
        return None, f"expected device {device}, got {actual.device}"
    problems = [] if actual.dtype == dtype else [f"expected {dtype}, got {actual.dtype}"]
    if actual.shape != shape:
        problems.append(f"expected shape {tuple(shape)}, got {tuple(actual.shape)}")
        seq = -1 if name == "lse" else -2
        if actual.dim() == len(shape) > 2 and actual.transpose(seq, seq - 1).shape == shape:
            actual = actual.transpose(seq, seq - 1)
            problems[-1] += ", compared with seq and heads exchanged"
        else:
            actual = None
    return actual, "; ".join(problems) or None


def _compare(name, actual, wanted, dtype, context, *, drop=0) -> TensorResult:
    """The worst element of one tensor. `drop` leading axes of length 1 are left out of the index shown."""
    rows = wanted.rows
    actual = wanted.of_rows(actual.detach().double())
    if actual.numel() == 0:
        return TensorResult(name, dtype, 0.0, True, rms_z=0.0)
    truth, sigma = wanted.truth, wanted.sigma
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
    return TensorResult(name, dtype, worst, passed, tuple(at[drop:]), *values, None, problem, hint, rms_z)
