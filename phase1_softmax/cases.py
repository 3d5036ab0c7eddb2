"""What phase 1 must get right, small enough for the interpreter; and what its chapter tries."""

from common import runtime
from common.edited import Stage
from common.measure.traffic import SECTOR, measure
from common.verify import verify_softmax
from common.verify.suite import Case
from phase1_softmax import online_softmax
from phase1_softmax.online_softmax import logsumexp, softmax, softmax_fused, softmax_online
from phase1_softmax.solutions.attend_rows import attend_rows

import torch
import triton


def cases():
    def case(what, fn, shape, dtype=torch.float32, factor=1.0, shift=0.0, kind="softmax"):
        x = factor * torch.randn(shape, generator=torch.Generator().manual_seed(0)) + shift
        x = x.to(runtime.DEVICE, dtype)
        return Case(f"{fn.__name__}: {what}", lambda: verify_softmax(fn, x, kind=kind))

    for dtype in runtime.DTYPES:
        yield case("one tile", softmax_fused, (3, 5, 100), dtype)
        yield case("several tiles", softmax_online, (7, 2500), dtype)
        yield case("ragged", logsumexp, (33, 1500), dtype, kind="logsumexp")
    yield case("one value a row", softmax, (40, 1))
    yield case("a single row", softmax, (129,))
    yield case("longer than 4096", softmax, (2, 5000))
    yield case("logits in the hundreds", softmax_online, (9, 1111), factor=200.0)
    yield case("logits in the hundreds", logsumexp, (9, 1111), factor=200.0, kind="logsumexp")
    yield case("all masked, (2, 3) rows", softmax, (2, 3, 64), shift=float("-inf"))
    yield case("no rows", softmax, (0, 17))


def randn(*shape, dtype=torch.float32, seed=0) -> torch.Tensor:
    """Random numbers, the same on every machine, where kernels can use them."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(runtime.DEVICE, dtype)


def loads(x: torch.Tensor) -> tuple[int, int]:
    """The bytes of x that `softmax_fused` loads, and the sectors in which they lie: counted where kernels are
    interpreted, otherwise computed for tiles of two rows.
    """
    if runtime.INTERPRETED:
        with measure() as moved:
            softmax_fused(x)
        return moved.loaded, moved.sectors
    run = 2 if x.stride(0) == 1 else x.shape[1]  # numbers of a tile that lie together
    return x.nbytes, x.numel() // run * triton.cdiv(run * x.itemsize, SECTOR)


def attended(s: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """What exercise 1.6's solution reads of s and of v, in units of the size of s: counted, or by its formula."""
    if not runtime.INTERPRETED:
        return 1.0, len(s) * v.nbytes / s.nbytes
    with measure(s=s, v=v) as moved:
        attend_rows(s, v)
    return moved.loaded_from["s"] / s.nbytes, moved.loaded_from["v"] / s.nbytes


def last_column_left_out(x: torch.Tensor) -> torch.Tensor:
    """A softmax whose sum lacks the last column."""
    wide = x.double()
    e = (wide - wide.amax(dim=-1, keepdim=True)).exp()
    return (e / e[:, :-1].sum(dim=-1, keepdim=True)).to(x.dtype)


def larger(x: torch.Tensor) -> torch.Tensor:
    """A softmax whose weights are too large by the largest rounding of bf16."""
    return (torch.softmax(x.double(), dim=-1) * (1 + 2.0**-8)).to(x.dtype)


def broken() -> Stage:
    """The kernels with a mistake that the chapter lets its reader find."""
    return Stage(online_softmax, ("online_softmax_step", "alpha * l_i +", "l_i +"))


def two_passes() -> tuple[str, ...]:
    """Which result needs two passes over a row, and why each does or does not."""
    return (
        "weights",
        "weights: the last logit changes the first weight, and a state of constant size cannot keep n exponentials",
        "LSE:     m + log l is corrected as the logits arrive",
        "output:  the division by l stands outside the sum, and happens once, after the last key",
    )


def printed_updates(s1, v1, s2, v2) -> dict[str, float]:
    """The largest error of the output for two tiles, in units of its largest element: by the right update, and by those
    that papers print. s1, s2 (rows, cols), v1, v2 (cols, head_dim).
    """
    s1, v1, s2, v2 = (t.double() for t in (s1, v1, s2, v2))
    m1 = s1.amax(dim=1, keepdim=True)
    m2 = torch.maximum(m1, s2.amax(dim=1, keepdim=True))
    p1, p2, factor = torch.exp(s1 - m1), torch.exp(s2 - m2), torch.exp(m1 - m2)
    l1 = p1.sum(dim=1, keepdim=True)
    l2 = factor * l1 + p2.sum(dim=1, keepdim=True)
    o1 = p1 @ v1 / l1  # the output of the first tile
    old_terms = {
        "right": l1 / l2 * factor * o1,
        "FlashAttention-2, p. 4": o1 / (l1 / l2),
        "p. 6, and FlashAttention-3": p1 @ v1 / factor / l2,
    }
    truth = torch.softmax(torch.cat([s1, s2], dim=1), dim=1) @ torch.cat([v1, v2])
    errors = {name: (old + p2 @ v2 / l2 - truth).abs().max() for name, old in old_terms.items()}
    return {name: (error / truth.abs().max()).item() for name, error in errors.items()}
