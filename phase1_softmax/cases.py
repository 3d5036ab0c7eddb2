"""What phase 1 must get right, small enough for the interpreter; and what its chapter tries."""

from common import runtime
from common.edited import Stage
from common.measure.traffic import SECTOR, measure
from common.verify import verify_softmax
from common.verify.suite import Case
from phase1_softmax import online_softmax
from phase1_softmax.online_softmax import logsumexp, softmax, softmax_fused, softmax_online

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


def attended(attend, s: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """What exercise 1.6's `attend` loads of s and of v, in units of the size of s: counted where kernels are
    interpreted, otherwise computed for one program a row.
    """
    if not runtime.INTERPRETED:
        return 1.0, len(s) * v.nbytes / s.nbytes
    with measure(s=s, v=v) as moved:
        attend(s, v)
    return moved.loaded_from["s"] / s.nbytes, moved.loaded_from["v"] / s.nbytes


def softmax_moves(s: torch.Tensor) -> tuple[float, float]:
    """What `softmax_online` loads and stores, in units of the size of s: counted, or by its formula."""
    if not runtime.INTERPRETED:
        return 2.0, 1.0
    with measure() as moved:
        softmax_online(s)
    return moved.loaded / s.nbytes, moved.stored / s.nbytes


def broken() -> dict[str, Stage]:
    """`softmax_online` with one of three mistakes each, which the chapter's reader tells apart by what they break."""
    step = "online_softmax_step"
    edits = {
        "a": (step, "tl.maximum(m_i, tl.max(s, axis=1))", "tl.max(s, axis=1)"),
        "b": ("_softmax_online_kernel", f"{step}(m_i, l_i, x)", f"{step}(m_i, l_i, tl.where(inside, x, 0.0))"),
        "c": (step, 'tl.where(m_new == float("-inf"), 0.0, m_new)', "m_new"),
    }
    return {name: Stage(online_softmax, edit) for name, edit in edits.items()}


def diagnoses() -> tuple[str, ...]:
    """Which of the stages in `broken` pads with 0, lacks the guard and lets the maximum fall, and what shows it."""
    return (
        "bca",
        "b: the sum has a term e^(0 - m) for each column that does not exist; at m = 100 it is lost in rounding",
        "c: -inf - (-inf) is NaN, as long as a row has seen nothing but -inf",
        "a: m falls from 200 to 100, and l overflows at e^88.7; a small fall does no harm, as l is right for any m",
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
        "p. 6 and FlashAttention-3 (A)": p1 @ v1 / factor / l2,
    }
    truth = torch.softmax(torch.cat([s1, s2], dim=1), dim=1) @ torch.cat([v1, v2])
    errors = {name: (old + p2 @ v2 / l2 - truth).abs().max() for name, old in old_terms.items()}
    return {name: (error / truth.abs().max()).item() for name, error in errors.items()}
