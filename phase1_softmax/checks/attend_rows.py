"""Checks attention from given logits: sizes, strides and dtypes of every kind, masked rows, the memory around
everything, and that each logit is read once.
"""

import math

from common import runtime
from common.learn.check.require import (
    NoHelp,
    Rejected,
    close,
    counted,
    explained_in,
    masked_loads_undefined,
    reject,
    require,
    require_none,
    require_stored,
)
from common.measure import offline
from common.verify import guard
from phase1_softmax.checks import INF, attention, called, pair, randn, require_sane

import torch

ROUNDING = {torch.float32: 0.0, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}


def check(answer):
    for what, s, v, dtypes, question in _cases():
        for dtype in dtypes:
            same = dict(dtype=dtype, device=runtime.DEVICE)
            named = f"{what}, {str(dtype).removeprefix('torch.')}"
            with explained_in(SECTIONS.get(question, "")):
                _check_case(answer, named, _copy(s, **same), _copy(v, **same), question)
    s, v = randn(3, 90), randn(90, 12, seed=1)
    s[1, 70] = math.nan
    for name, t in zip(("o", "lse"), pair("attend_rows", answer.attend_rows(s, v)), strict=True):
        if t.reshape(3, -1).isnan().all(1).tolist() != [False, True, False]:
            reject(f"a NaN in row 1 of s: {name} must be NaN in row 1 and nowhere else")
    _require_tiles(answer)
    return "sizes, strides and dtypes of every kind; rows that see nothing; each logit read once"


def _require_tiles(answer):
    """The same kernel for rows of any length."""
    launches = []
    for n in (512, 8192):
        s, v = (torch.empty(shape, device=runtime.DEVICE) for shape in ((4, n), (n, 64)))
        launches.append(offline.record_launches(lambda s=s, v=v: answer.attend_rows(s, v)))
    anew = (
        "the kernel is compiled anew for rows of another length: does a tile hold a whole row? A long one does not "
        "fit on the chip. Take a row a tile of columns at a time, by the recurrence of section 4.4"
    )
    require_none({anew: launches[0] != launches[1]})


# Cases are (kind, s, v, dtypes, what to ask where it fails).
ONE, ALL = (torch.float32,), runtime.DTYPES
LONG = 5000  # logits in a row, so that tiles of 4096 make a loop, too
RESCALE = "the same rows falling are right: is everything that was summed under an old maximum rescaled?"
FALLEN = "is m the maximum of the newest tile alone?"
STRIDES = "is every element found by its own tensor's strides?"
SECTIONS = {RESCALE: "4.4", STRIDES: "3.3"}


def _cases():
    v, w = _apart(randn(100, 24, seed=1), more=106), _apart(randn(LONG, 8, seed=2))
    falling = _apart(randn(5, 100).sort(descending=True).values)
    ramp = torch.linspace(-30, 30, LONG).expand(2, LONG)
    seen = randn(4, 100)
    seen[0, 30:] = seen[1, :70] = seen[3] = -INF
    column_major = _apart(randn(24, 100, seed=1)).t()
    five, wide = randn(70, 5, seed=1), randn(70, 200, seed=1)
    return [
        ("5 rows of 100 falling logits", falling, v, ALL, "what does the second tile do to m, l and acc?"),
        (f"{LONG} falling logits a row", ramp.flip(1), w, ONE, "is the end of the row reached?"),
        (f"{LONG} rising logits a row", ramp, w, ONE, RESCALE),
        ("logits from 0 down to -200", ramp.flip(1) * 10 / 3 - 100, w, ONE, FALLEN),
        ("400 logits a row", randn(2, 400), w[:400], ALL, RESCALE),
        ("logits near 1000", randn(2, 100) + 1000, v, ONE, "is the maximum subtracted before exp?"),
        ("logits near -10000", randn(2, 100) - 10000, v, ONE, "does m start from -inf?"),
        ("logits near -20000", randn(2, 100) - 20000, v, ONE, "what is subtracted: is -1e4 larger than m?"),
        ("masked logits and a row without any other", seen, v, ALL, "what is subtracted where m is -inf?"),
        ("s transposed", _apart(randn(100, 3)).t(), v, ONE, STRIDES),
        ("v transposed", randn(3, 100), column_major, ONE, STRIDES),
        ("every other logit of a row", randn(3, 200)[:, ::2], v, ONE, STRIDES),
        ("one row, expanded to 3", randn(1, 100).expand(3, 100), v, ONE, STRIDES),
        ("rows of one logit", randn(3, 1), randn(1, 16), ONE, "what fills the rest of a tile?"),
        ("head_dim 5", randn(3, 70), five, ONE, "is the last axis masked?"),
        ("head_dim 200", randn(2, 70), wide, ONE, "is all of the last axis computed?"),
        ("no logits", randn(3, 0), randn(0, 24), ONE, "o = 0 and lse = -inf are right"),
        ("no rows", randn(0, 100), v, ONE, "an empty grid cannot be launched on a GPU"),
    ]


def _apart(x, more=3):
    """x with other numbers before, behind and between its rows, `more` of them; two rows of them behind, so that the
    strides of v stay inside of s's memory.
    """
    big = x.new_full((x.shape[0] + 3, x.shape[1] + more), 9.0)[1:-2, 1 : 1 + x.shape[1]]
    return big.copy_(x)


def _copy(x, **options):
    """x in memory of its own with the same strides, and what lies between its elements."""
    if 0 in x.shape:
        return x.to(**options)
    memory = x.as_strided((x.untyped_storage().nbytes() // x.itemsize,), (1,), 0).to(**options, copy=True)
    return memory.as_strided(x.shape, x.stride(), x.storage_offset())


def _check_case(answer, what, s, v, question):
    def attend(s, v):
        with NoHelp():
            return answer.attend_rows(s, v)

    with guard.watched() as allocated, masked_loads_undefined(), counted(s=s, v=v) as moved:
        o_got, lse_got = pair(f"attend_rows, {what}", attend(s, v))
    o, lse = attention(s.double(), v.double())
    # Where kernels do not compute in bf16, this one sees copies.
    watched = moved and s.dtype not in runtime.KERNEL_DTYPE
    if watched:
        _require_masked(what, s, v, moved)
    require_stored(dict(o=o_got, lse=lse_got), allocated, what=what)
    _require_padded(what, (o_got, lse_got), (o, lse), attend, s, v)
    if s.dtype in runtime.KERNEL_DTYPE:
        question = "fp16 is right: is bf16 converted before the launch, by runtime.to_kernel_dtype?"
    _require_right(what, s, v, (o_got, lse_got), (o, lse), question)
    if o_got.dtype != s.dtype or lse_got.dtype != torch.float32:
        reject(f"{what}: o must be {s.dtype} and lse fp32, but they are {o_got.dtype} and {lse_got.dtype}")
    if watched:
        _require_traffic(what, s, v, moved)
    if what.startswith("head_dim 5"):
        called(attend, s, v)


def _require_padded(what, got, right, attend, s, v):
    """Reject NaN that disappears where a masked load without `other` finds zeros, or where no tile of v is padded."""
    spoiled = [_nan(g) and not _nan(r) for g, r in zip(got, right, strict=True)]
    if not any(spoiled):
        return
    with guard.watched():
        with_zeros = pair(what, attend(s, v))
    if any(bad and not _nan(g) for bad, g in zip(spoiled, with_zeros, strict=True)):
        reject(
            f"{what}: a load has a mask but no `other`: what it returns beyond the end is undefined, here NaN, and "
            "0 * NaN is NaN. Which number changes neither sum?"
        )
    padded = got[1].isfinite().all() and got[0].isnan().all()
    if padded and not _nan(attend(randn(1, 1024).to(s), randn(1024, 16).to(v))[0]):
        reject(
            f"{what}: o is NaN, but not for 1024 logits, which fill their tiles: what is `other` of the load of v? "
            "Beyond the end of a row the weight is 0, and 0 * inf is NaN: pad v with 0"
        )


def _nan(t):
    return isinstance(t, torch.Tensor) and bool(t.isnan().any())


def _require_right(what, s, v, got, right, question):
    wide, (o_got, lse_got), (o, lse) = s.double(), got, right
    top = wide.amax(1) if s.shape[1] else lse
    shift = torch.where(lse == -INF, 0.0, lse)
    of_lse = {
        "this is the maximum alone: log(l) is missing": top,
        "this is log(l): add m to it": lse - top,
        "this is l: lse is m + log(l)": torch.exp(lse - top),
        "this is a logarithm to base 2": lse / math.log(2),
        "log(l) is to base 2 here": top + (lse - top) / math.log(2),
        "a row that sees nothing has lse = -inf: lse is log(l) plus m itself, not plus what is subtracted": shift,
        "this is 0: does m start from -inf? Above all logits l becomes 0": torch.zeros_like(lse),
        "the numbers of a row of s are a stride apart, too": torch.logsumexp(_as(s, (s.stride(0), 1)), 1),
        "a row of s is sought at row * n: rows are a stride apart": torch.logsumexp(_as(s, (s.shape[1], 1)), 1),
        "s is read with the strides of v": torch.logsumexp(_as(s, v.stride()), 1),
        "this is -inf: is m updated in the loop?": torch.full_like(lse, -INF),
        **_own_maximum(wide),
    }
    for n in (2**k for k in range(4, 13) if 2**k < s.shape[1]):
        first = f"this is the lse of the first {n} logits: does the loop go on?"
        of_lse[first] = torch.logsumexp(wide[:, :n], 1)
    padded = "columns that do not exist count as logits of 0: what is `other` of the load?"
    short = bool(torch.equal(lse_got, lse_got.half().float())) and _near(lse_got, lse)
    rounded = "it is rounded to 16 bits: lse is fp32"
    signs = {padded: _padded_with_0(lse_got, lse), rounded: short}
    _require_first_step(what, wide, lse_got)
    require_sane(f"{what}: lse", lse_got, lse, f" Or: {question}")
    tolerance = dict(rtol=1e-5, atol=1e-4)
    _require(f"{what}: lse", lse_got, lse, question, mistakes=of_lse, signs=signs, **tolerance)

    p = torch.exp(wide - shift[:, None])
    of_o = {
        "the sum is not divided by l": torch.exp(lse - top)[:, None] * o,
        **_wrong_loops(wide, v.double()),
        "v is read with the strides of s": p @ _as(v, s.stride()),
        "the strides of v's rows and columns are exchanged": p @ _as(v, v.stride()[::-1]),
        "v is read as if it were contiguous": p @ _as(v, (v.shape[1], 1)),
    }
    u = ROUNDING[s.dtype]
    short = "it is rounded to 16 bits more than once: is everything else computed in fp32?"
    once = s.dtype in runtime.KERNEL_DTYPE  # nothing is in 16 bits inside
    signs = {short: not once and u and _near(o_got, o)}
    empty = (lse == -INF)[:, None].expand(o.shape)
    if o_got.shape == o.shape and o_got.isnan().any() and torch.equal(o_got.isnan(), empty):
        reject(f"{what}: o is NaN in a row that sees nothing. Its l is 0, and 0 / 0 is NaN: what may it be divided by?")
    require_sane(f"{what}: o", o_got, o, f" Or: {question}")
    tolerance = dict(rtol=1.02 * u + 1e-5, atol=1e-5)
    _require(f"{what}: o", o_got, o, question, mistakes=of_o, signs=signs, **tolerance)


def _require_first_step(what, s, lse_got):
    """Reject NaN in every row though all logits are finite: the first step makes it, from m = -inf."""
    if lse_got.numel() and lse_got.isnan().all() and s.isfinite().all():
        why = "In the first step m is -inf: exp(m - m') is 0, but exp(m' - m) is infinite, and m - m is NaN"
        reject(f"{what}: lse is NaN in every row, though all logits are finite. {why}. Which of them is alpha?")


def _require(what, actual, right, question, **options):
    """`require`, and a question before its numbers where nothing is recognized."""
    try:
        require(what, actual, right, **options)
    except Rejected as wrong:
        numbers = str(wrong).removeprefix(f"{what}: ")
        reject(f"{what}: {question}\n{numbers}" if "elements are wrong" in numbers else str(wrong))


def _wrong_loops(s, v):
    """What comes of a wrong update of acc, for tiles of every size."""
    results = {}
    for cols in (2**k for k in range(4, 13)):
        m = s.new_full((s.shape[0], 1), -INF)
        l = torch.zeros_like(m)
        rescaled = divided = shrunk = s.new_zeros(s.shape[0], v.shape[1])
        for tile, values in zip(s.split(cols, 1), v.split(cols), strict=True) if v.shape[0] else ():
            m_new = torch.maximum(m, tile.amax(1, keepdim=True))
            shift = torch.where(m_new == -INF, 0.0, m_new)
            alpha, p = torch.exp(m - shift), torch.exp(tile - shift)
            m, l = m_new, alpha * l + p.sum(1, keepdim=True)
            rescaled = alpha * (rescaled + p @ values)
            norm = torch.where(l == 0, 1.0, l)
            divided = alpha * divided + p @ values / norm
            shrunk = (alpha * shrunk + p @ values) / norm
        norm = torch.where(l == 0, 1.0, l)
        tiles, rescaled = f"(tiles of {cols})", rescaled / norm
        results[f"alpha rescales p v as well {tiles}: p v counts against the new maximum already"] = rescaled
        inside = f"{tiles}: l is not complete there, so divide acc once, after the last tile"
        results[f"p v is divided by l inside the loop {inside}"] = divided
        results[f"p v is divided by l inside the loop, and again after it {inside}"] = divided / norm
        each = f"{tiles}: alpha rescales sums, and this is none. Divide acc once, after the last tile"
        results[f"acc is divided by l in every step {each}"] = shrunk
        results[f"acc is divided by l in every step, and again after the loop {each}"] = shrunk / norm
    return results


def _own_maximum(s):
    """The lse if each tile is measured against its own maximum, for tiles of every size."""
    top, results = s.amax(1) if s.shape[1] else s.new_zeros(0), {}
    for cols in (2**k for k in range(4, 13) if 2**k < s.shape[1]):
        m, l = torch.full_like(top, -INF), torch.zeros_like(top)
        for tile in s.split(cols, 1):
            own = tile.amax(1)
            m_new = torch.maximum(m, own)
            m, l = m_new, l * torch.exp(m - m_new) + torch.exp(tile - own[:, None]).sum(1)
        wrong = f"a tile is measured against its own maximum, not against the new one (tiles of {cols})"
        results[wrong] = top + torch.log(l)
    return results


def _padded_with_0(got, right):
    """True if exp(got) is exp(right) plus the same whole number in every row."""
    if got.shape != right.shape or not right.numel() or not (right.abs() < 20).all():
        return False
    more = torch.exp(got.double()) - torch.exp(right)
    return bool(more.min() > 0.5 and (more - more.round()).abs().max() < 0.05 and more.round().unique().numel() == 1)


def _as(v, stride):
    """v as it is read with other strides; where they leave its memory, v itself."""
    reach = v.storage_offset() + sum((n - 1) * step for n, step in zip(v.shape, stride, strict=True))
    inside = 0 not in v.shape and reach < v.untyped_storage().nbytes() // v.itemsize
    return (v.as_strided(v.shape, stride) if inside else v).double()


def _near(got, right):
    return got.shape == right.shape and close(got, right, 0.05)


def _require_masked(what, s, v, moved):
    (read_s, read_v), of_s = (moved.loaded_from[name] for name in "sv"), s.numel() * s.itemsize
    of_v, again = of_s * v.shape[1], of_s and read_s % of_s == 0  # the whole of s: `_require_traffic` says so
    beside = 0 < read_s < of_s and (moved.loaded_from["other"] or read_v > of_v)  # v may lie right behind s
    signs = {
        "memory beside s is read, and not all of s: are the strides of its rows and columns exchanged?": beside,
        f"{read_s} bytes of s are read, s has {of_s}: does the load of s have a mask?": read_s > of_s and not again,
        f"{read_v} bytes of v are read; once for each row are {of_v}: is it masked?": read_v > of_v,
    }
    require_none(signs, what)


def _require_traffic(what, s, v, moved):
    if not s.numel():
        return
    times = moved.loaded_from["s"] / (s.numel() * s.itemsize)
    written, wanted = moved.stored, len(s) * (v.shape[1] * s.itemsize + 4)
    signs = {
        "no kernel has read anything: is it launched?": not moved.loaded,
        "the kernel reads a copy of s: pass s itself, and its strides": times == 0,
        f"only {times:.0%} of the logits are read: does the loop go on to the end of the row?": times < 1,
        f"every logit is read {times:g} times: once is enough, as l divides at the end": times != 1,
        "the kernel reads something besides s and v: did it store weights or sums?": moved.loaded_from["other"],
        f"{written} bytes are written, o and lse have {wanted}: store after the loop": written != wanted,
    }
    require_none(signs, what)
