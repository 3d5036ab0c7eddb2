"""Checks FP8 and scales to the bit, the kernel on given ones, the error that rounding leaves, and the rotation."""

import itertools
import math

from common import make_qkv, runtime
from common.learn.check.require import after, close, explained_in, guarded, reject, require, require_none
from common.verify.expected import UNIT_ROUNDOFF, E
from common.verify.harness import Z_MAX
from common.verify.reference import naive_attention
from phase5_tuning.checks import BF16, FP16, FP32, INF

import torch

FP8, ROWS, LARGEST = torch.float8_e4m3fn, 64, 448.0
U8 = 2.0**-4  # half of the spacing between neighbors, relative: 3 bits of mantissa
TOP = 2.0**8  # by which P is multiplied: any factor from 16 to 448 passes


def check(answer):
    quantize = guarded(answer.quantize, names=())  # FP8 has two NaNs only: an element that is never stored is one
    _check_quantize(quantize)
    _check_smallest(quantize)
    _check_no_rows(quantize)
    # First a single tile, then as many tiles of keys as of queries: so that most mistakes can be computed.
    for *sizes, is_causal in ((64, 60, 16, False), (150, 180, 32, False), (100, 90, 40, True), (40, 130, 16, False)):
        check_quantized_attention(answer, 1, 2, *sizes, is_causal=is_causal)
    for scale, stretch in ((-0.3, -20), (0.5, 20), (0.0, 0)):
        options = dict(is_causal=scale < 0, scale=scale, stretch=stretch)
        check_quantized_attention(answer, 1, 1, 70, 70, 32, **options)

    _check_small_weights(answer)

    q, k, v = make_qkv(1, 2, 140, 64, seq_k=200, dtype=FP32)
    z = rounding_z(answer.attention_fp8(q, k, v), q, k, v)
    if not z <= Z_MAX:
        reject(f"o is {z:.1f} times as far off as rounding to FP8 can explain (at most {Z_MAX:g} times is usual)")
    ours, one_scale = outlier_errors(answer.attention_fp8)
    if not ours < one_scale / 2:
        reject(
            f"with an outlier in the last block the rows before it are {ours:.1%} off, with one scale for the whole "
            f"tensor {one_scale:.1%}: does a block's scale depend on its own rows only?"
        )
    with after("codes, scales and the kernel, which is the first stage"), explained_in("3.3"):
        for columns in (64, 128):
            _check_rotated(answer.rotated, columns)
        _check_rotated_attention(answer)
    return (
        f"FP8 and scales to the bit, ragged and empty blocks too; o within rounding ({z:.1f} of at most {Z_MAX:g}); "
        f"beside an outlier an error of {ours:.1%}, with one scale a tensor {one_scale:.1%}; rotated and not"
    )


def _check_quantize(quantize):
    for seq, dtype, layout in ((150, FP32, "bhsd"), (64, FP16, "bshd"), (5, BF16, "transposed"), (128, FP16, "sliced")):
        t = make_qkv(2, 3, seq, 24, dtype=dtype, layout=layout)[0]
        t.mul_(2.0 ** torch.arange(-4, 2, device=t.device).view(2, 3, 1, 1).to(dtype))
        t[:, :, : seq // 2] *= 8
        t[1, 1, :64] = 0
        if dtype != FP16:
            t[0, 0] *= 2.0**-30  # small, but not 0
        before = t.clone()
        t8, scales = quantize(t)
        what = f"quantize, seq {seq}, {dtype}"
        if not torch.equal(t, before):
            reject(f"{what}: t has been changed")
        _require_form(what, t, t8, scales)
        right8, right = quantized(t)
        mistakes = _wrong_scales(t, right)
        require(f"scales, {what}", scales, right.double(), rtol=1e-6, atol=0, mistakes=mistakes)
        _require_nearest(f"t8, {what}", t, t8, right8, _of_rows(right, seq))


def _check_no_rows(quantize):
    try:
        shapes = [tuple(t.shape) for t in quantize(make_qkv(2, 3, 0, 24)[0])]
    except (IndexError, ValueError, RuntimeError) as error:
        shapes = repr(error)
    if shapes != [(2, 3, 0, 24), (2, 3, 0)]:
        reject(f"quantize, seq 0: t8 and scales of shapes (2, 3, 0, 24) and (2, 3, 0) are right, not {shapes}")


def _check_smallest(quantize):
    """The largest element of a block may be so small that its 448th part is 0 in fp32."""
    t = torch.full((1, 1, 64, 16), 1e-43, device=runtime.DEVICE)
    t8, scales = quantize(t)
    if (scales == 0).any() or t8.float().isnan().any():
        reject(
            f"quantize, a block of 1e-43: the scale is {scales.max().item():g}, t8 is {t8.float().max().item():g}. "
            "1e-43 / 448 is 0 in fp32: ask whether the scale is 0, not whether the largest element is"
        )


def _require_form(what, t, t8, scales):
    """dtypes, shapes, contiguity, and no NaN."""
    if t8.dtype != FP8 or t8.shape != t.shape:
        reject(f"{what}: expected t8 {tuple(t.shape)} in {FP8}, got {tuple(t8.shape)} in {t8.dtype}")
    if not t8.is_contiguous():
        reject(f"{what}: t8 is not contiguous, but the kernel counts on it")
    if scales.dtype != FP32 or not scales.is_contiguous():
        reject(f"{what}: expected scales in {FP32}, contiguous, got {scales.dtype}, strides {scales.stride()}")
    if scales.shape == t.shape[:3]:
        reject(f"{what}: a scale for every row; wanted is one for a block of 64 rows")
    if scales.isnan().any() or t8.float().isnan().any():
        reject(f"{what}: there is NaN in t8 or scales. Is there a block of zeros?")


def _wrong_scales(t, right):
    """{sentence: scales with that mistake}."""

    def of_blocks(largest):
        return torch.stack([largest(b) for b in t.float().split(ROWS, dim=2)], dim=2) / LARGEST

    amax, zero = t.float().abs(), right == 1
    of_rows = of_blocks(lambda b: b.abs().amax(dim=2).mean(2))
    signed = of_blocks(lambda b: b.amax(dim=(2, 3)))
    per_head = (amax.amax(dim=(2, 3)) / LARGEST)[..., None].expand(right.shape)
    per_tensor = (amax.max() / LARGEST).expand(right.shape)
    small_is_0 = torch.where(right < 1e-6, 1.0, right)
    undivided = torch.where(zero, 1.0, right * LARGEST)
    return {
        "a block of zeros has the scale 0: 0 / 0 is NaN, take 1": right.masked_fill(zero, 0.0),
        "this is 1 / scale: t8 = t / scale": 1 / right,
        "448 is missing: the largest element becomes 448": undivided,
        "one scale for the whole tensor: each block has its own": per_tensor,
        "one scale for a head: each block of 64 rows has its own": per_head,
        "only a block of zeros has the scale 1, not one of small numbers": small_is_0,
        "this is the largest element: the largest |element| counts": torch.where(signed == 0, 1.0, signed),
        "a mean is taken: the largest |element| counts": of_rows,
    }


def _require_nearest(what, t, t8, right8, scales):
    """t8 holds the numbers nearest to t / scales; between two as near, any may be taken."""
    x = t.double() / scales.double()
    off, least = ((each.double() - x).abs() for each in (t8, right8))
    right = torch.where(off <= least + 2.0**-20 * x.abs(), t8.double(), right8.double())
    wrong = {
        "t is multiplied by the scale": t.float() * scales,
        "t is not divided by the scale": t,
        "t is divided in 16 bits: convert it to fp32 first": t / scales.to(t.dtype),
    }
    mistakes = {sentence: t.to(FP8).double() for sentence, t in wrong.items()}
    require(what, t8.double(), right, rtol=0, atol=0, mistakes=mistakes)


def quantized(t, rows=ROWS):
    """(t8, scales) with a scale for `rows` rows of a head."""
    blocks = t.float().split(rows, dim=2)
    amax = [b.abs().amax(dim=(2, 3), keepdim=True) for b in blocks]
    scales = [torch.where(a == 0, 1.0, a / LARGEST) for a in amax]
    t8 = torch.cat([b / s for b, s in zip(blocks, scales, strict=True)], dim=2).to(FP8)
    return t8, torch.cat([s[..., 0, 0][..., None] for s in scales], dim=2)


def restored(t8, scales, rows=ROWS):
    """t8 * scales, fp64."""
    return t8.double() * scales.double().repeat_interleave(rows, dim=2)[:, :, : t8.shape[2], None]


def _of_rows(scales, seq):
    return scales.repeat_interleave(ROWS, dim=2)[:, :, :seq, None]


def check_quantized_attention(
    answer, batch, heads, seq_q, seq_k, head_dim, *, is_causal=False, scale=None, dtype=FP32, stretch=0
):
    """The kernel on given t8 and scales, which differ by powers of two from block to block, against fp64. q and v are
    2^stretch times as large as usual, k as small."""
    pairs = []
    for n, t in enumerate(make_qkv(batch, heads, seq_q, head_dim, seq_k=seq_k, dtype=FP32)):
        t8, scales = quantized(t)
        blocks = torch.arange(scales.numel(), device=t.device).view(scales.shape)
        powers = torch.tensor([0.25, 1.0, 2.0], device=t.device)[(blocks + n) % 3]
        pairs.append((t8, scales * powers * 2.0 ** (-stretch if n == 1 else stretch)))
    o = guarded(answer.attention_quantized)(*itertools.chain(*pairs), is_causal, scale, dtype)
    what = f"o from t8 and scales, {seq_q} queries, {seq_k} keys{', causal' if is_causal else ''}"
    if scale is not None:
        near = f", v near 2^{stretch} (is what holds a scale fp32?)" if stretch else ""
        what += f", scale {scale}{near}"
        if scale <= 0 and not o.isfinite().all():
            reject(f"{what}: not finite. Is the mask there before the scale? -inf * 0 is NaN, -inf * -1 is +inf")
    factor = 1 / math.sqrt(head_dim) if scale is None else scale
    hidden = torch.ones(seq_q, seq_k, dtype=torch.bool, device=o.device).triu(1) & is_causal
    q, k, v = (restored(*pair) for pair in pairs)
    right = _attention(q, k, v, factor, hidden)
    # Sums in fp32. Compiled, tensor cores add up FP8 products with few bits more than fp16 has.
    of_logits = (abs(factor) * q.abs() @ k.abs().mT).max().item()
    of_logits *= E if runtime.INTERPRETED else 2.0**-12
    of_o = 0 if dtype == FP32 else UNIT_ROUNDOFF[dtype]
    size = _attention(q, k, v.abs(), factor, hidden, to=_as_it_is).max().item()
    atol = 4 * (UNIT_ROUNDOFF[FP16] + of_logits + 4 * E + of_o) * size
    unrounded = _attention(q, k, v, factor, hidden, to=_as_it_is)
    if ((o.double() - unrounded).abs() <= Z_MAX * _of_p(q, k, v, factor, hidden) + atol).all():
        exact = (o.double() - unrounded).norm() < 0.1 * (right - unrounded).norm()
        signs = {"P V is not a product of eight bits: P is to be rounded to v.dtype": exact and runtime.INTERPRETED}
        return require_none({sign: bool(shown) for sign, shown in signs.items()}, what)
    mistakes = _wrong_scaling(pairs, factor, hidden) | _wrong_loop(q, k, v, factor, hidden)
    if stretch < 0:
        sentence = "P times the scale of v is 0 in eight bits: the scale belongs to the product P V, which is fp32"
        mistakes[sentence] = torch.zeros_like(right)
    return require(what, o, right, rtol=0, atol=atol, mistakes=mistakes)


def _e4m3(p, top=TOP):
    """p in [0, 1] as e4m3 has it, multiplied by top."""
    return (p * top).clamp(max=LARGEST).float().to(FP8).double() / top


def _as_it_is(p):
    return p


def _attention(q, k, v, factor, hidden, to=_e4m3, rescaled=True, sum_of=_as_it_is):
    """o in fp64, 64 keys a turn: P V with P passed through `to`, the row sum with P passed through `sum_of`."""
    m = torch.full((*q.shape[:3], 1), -INF, dtype=torch.float64, device=q.device)
    total, acc = torch.zeros_like(m), 0.0
    for start in range(0, k.shape[2], ROWS):
        keys = slice(start, start + ROWS)
        s = (factor * q @ k[:, :, keys].mT).masked_fill(hidden[:, keys], -INF)
        new = torch.maximum(m, s.amax(dim=-1, keepdim=True))
        p, alpha = torch.exp(s - new), torch.exp(m - new)
        total = total * alpha + sum_of(p).sum(dim=-1, keepdim=True)
        acc = acc * (alpha if rescaled else 1.0) + to(p) @ v[:, :, keys]
        m = new
    return acc / total


def _of_p(q, k, v, factor, hidden):
    """What rounding P to e4m3 changes in each element of o: usually, and by what is rounded to 0 at most."""
    p = (factor * q @ k.mT).masked_fill(hidden, -INF).softmax(-1)
    least = 2.0**-10 / 16 * p.amax(-1, keepdim=True)
    return 0.0265 * (p**2 @ v**2).sqrt() + torch.minimum(p, least) @ v.abs() / Z_MAX


def _check_small_weights(answer):
    """One key has nearly all of the weight and the value 0; what is left are weights of about 2^-10."""
    q, k, v = (torch.zeros(1, 1, n, 32, device=runtime.DEVICE) for n in (64, 128, 128))
    q[..., 0], k[:, :, 0, 0] = 1.0, 10 * math.log(2)
    v[:, :, 1:] = make_qkv(1, 1, 127, 32, dtype=FP32)[2].abs() + 0.5
    pairs = [quantized(t) for t in (q, k, v)]
    o = guarded(answer.attention_quantized)(*itertools.chain(*pairs), False, 1.0)
    hidden = torch.zeros(64, 128, dtype=torch.bool, device=o.device)
    right, lost = (_attention(*(restored(*pair) for pair in pairs), 1.0, hidden, to) for to in (_e4m3, _of_one))
    sentence = (
        "weights below 2^-10 of the largest are lost: P is at most 1, where e4m3 reaches 448. Multiply P by a power "
        "of two before you round it, and divide the product"
    )
    require(
        "o where the other weights are 2^-10 of the largest", o, right, rtol=0.05, atol=0, mistakes={sentence: lost}
    )


def _of_one(p):
    return _e4m3(p, 1.0)


def _wrong_scaling(pairs, factor, hidden):
    """{sentence: o with a mistake in the scales of q, k and v}."""
    (_, sq), (k8, sk), (v8, sv) = pairs
    q, k, v = (restored(*pair) for pair in pairs)
    raw_q, raw_k, raw_v = (t8.double() for t8, _ in pairs)
    first_q, first_k, first_v = (t8.double() * scales[:, :, :1, None] for t8, scales in pairs)
    last_v = raw_v * sv[:, :, -1:, None]
    later = sv.double().flip(2).cumprod(dim=2).flip(2)  # of a tile and of all that come after it
    wrong = {
        "the scale of q is missing": (raw_q, k, v),
        "the scale of k is missing": (q, raw_k, v),
        "the scale of v is missing": (q, k, raw_v),
        "the scales of k and v are exchanged": (q, restored(k8, sv), restored(v8, sk)),
        "all of acc has the scale of the last block of v: each share of it has its own": (q, k, last_v),
        "the scale of v belongs to this tile's share, not to what acc holds already": (q, k, restored(v8, later)),
        "every tile of k has the scale of the first one": (q, first_k, v),
        "every tile of v has the scale of the first one": (q, k, first_v),
        "every tile of q has the scale of the first one": (first_q, k, v),
        "only the scales are multiplied, not K and V of this tile": (q, raw_k, raw_v),
    }
    mistakes = {sentence: _attention(*qkv, factor, hidden) for sentence, qkv in wrong.items()}
    if sq.shape == sk.shape:
        of_q, of_k = (raw_q, restored(k, sq), v), (restored(q, sk), raw_k, v)
        mistakes |= {
            "the scale of q is that of the block of queries, pid_m": _attention(*of_q, factor, hidden),
            "the scale of k is that of the block of keys, pid_n": _attention(*of_k, factor, hidden),
            "the scale of v is that of the block of keys, pid_n": restored(_attention(q, k, raw_v, factor, hidden), sv),
        }
    return mistakes


def _wrong_loop(q, k, v, factor, hidden):
    """{sentence: o with a mistake in the scale of the softmax, in the mask or in the state}."""
    (seq_q, head_dim), seq_k = q.shape[2:], k.shape[2]
    usual = 1 / math.sqrt(head_dim)
    k_padded, v_padded = (torch.nn.functional.pad(t, (0, 0, 0, -seq_k % ROWS)) for t in (k, v))
    i, j = (torch.arange(n, device=q.device) // ROWS for n in (seq_q, k_padded.shape[2]))
    not_visited = (j > i[:, None]) & hidden.any()

    def with_factor(factor):
        return _attention(q, k, v, factor, hidden)

    unmasked = _attention(q, k_padded, v_padded, factor, not_visited)
    return {
        "the scale of the softmax, 1 / sqrt(head_dim), is missing": with_factor(1.0),
        "the scale of the softmax is multiplied twice": with_factor(factor * factor),
        "the argument `scale` is ignored": with_factor(usual),
        "S is divided by the scale of the softmax": with_factor(1 / factor if factor else 1.0),
        "`visible` is missing: -inf where it is False": unmasked,
        "acc is not rescaled by alpha": _attention(q, k, v, factor, hidden, rescaled=False),
        "P is multiplied by more than 448, where e4m3 ends": _attention(q, k, v, factor, hidden, _of_512),
        "P is multiplied by more than 448, where e4m3 ends, and the row sum is of what is left": (
            _attention(q, k, v, factor, hidden, _of_512, sum_of=_of_512)
        ),
        "P is multiplied by a factor, which the product is to be divided by": 256 * with_factor(factor),
    }


def _of_512(p):
    return _e4m3(p, 512.0)


def rounding_z(o, q, k, v) -> float:
    """The error of o in units of what rounding q, k, v and P to FP8 explains, U8 for each element, to first order.

    dO_i = sum_j P_ij (dS_ij (V_j - O_i) + dV_j), with dS = scale (dQ K^T + Q dK^T). The error of a query is the same
    for all keys, so its part is summed over keys before it is squared.
    """
    q, k, v = q.double(), k.double(), v.double()
    scale = 1 / math.sqrt(q.shape[-1])
    p = torch.softmax(scale * q @ k.mT, dim=-1)
    truth = p @ v
    off = v[..., None, :, :] - truth[..., :, None, :]  # (..., queries, keys, head_dim)
    of_q = scale * torch.einsum("...ij,...jc,...ijd->...icd", p, k, off)  # dO_id / dQ_ic
    var = torch.einsum("...icd,...ic->...id", of_q**2, q**2)
    var += torch.einsum("...ij,...ijd->...id", (scale * p) ** 2 * (q**2 @ k.mT**2), off**2)
    var += 2 * p**2 @ v**2  # of v, and of P
    return ((o.double() - truth).abs() / (U8 * var.sqrt())).max().item()


def outlier_errors(fp8) -> tuple[float, float]:
    """RMS error of o, relative, with a scale for a block and with one for the tensor, in rows before an outlier.

    The last block of q, k and v is 30,000 times as large. Under the causal mask the rows before it do not see it.
    """
    inputs = [t.clone() for t in make_qkv(1, 2, 128, 64, dtype=FP32)]
    for t in inputs:
        t[:, :, 64:] *= 3e4
    truth = naive_attention(*(t.double()[:, :, :64] for t in inputs), is_causal=True)[0]
    coarse = [restored(*quantized(t, rows=t.shape[2]), rows=t.shape[2])[:, :, :64] for t in inputs]
    outputs = fp8(*inputs, True)[:, :, :64].double(), naive_attention(*coarse, is_causal=True)[0]
    return tuple(((o - truth).square().mean() / truth.square().mean()).sqrt().item() for o in outputs)


def _check_rotated(rotated, columns):
    what = f"rotated, head_dim {columns}"
    one = torch.eye(columns, device=runtime.DEVICE)
    matrix = rotated(one)
    if matrix.shape != one.shape or matrix.dtype != FP32:
        reject(f"{what}: expected {tuple(one.shape)} in {FP32}, got {tuple(matrix.shape)} in {matrix.dtype}")
    if not torch.equal(matrix, rotated(one)):
        reject(f"{what}: two calls rotate in two ways, so q and k would too: draw the signs from a fixed seed")
    t = make_qkv(2, 3, 7, columns, dtype=BF16)[0]
    before, m = t.clone(), matrix.double()
    got = rotated(t)
    require(f"{what}, of (2, 3, 7, {columns}) in {BF16}", got, t.double() @ m, rtol=1e-3, atol=1e-3)
    product, spike = m @ m.mT, columns**0.5
    signs = {
        "t has been changed": not torch.equal(t, before),
        "rows become longer: divide by sqrt(head_dim)": close(product, columns * one),
        "M M^T is not 1: products of rows change": not close(product, one),
        "a single large element is to be spread over all columns alike": not close(m.abs(), one * 0 + 1 / spike),
        "a row of equal numbers becomes one large number: the signs belong before H, to the columns of t": bool(
            m.sum(0).abs().max() > 0.75 * spike
        ),
    }
    require_none(signs, what)


def _check_rotated_attention(answer):
    """On a q and a k with large elements that meet: without them a rotation is hardly seen in o."""
    q, k, v = make_qkv(1, 2, 100, 64, seq_k=150, dtype=FP32)
    q[..., 3] *= 8
    k[..., 3] *= 8
    o, still = answer.attention_fp8(q, k, v, rotate=True), answer.attention_fp8(q, k, v)
    if torch.equal(o, still):
        reject("attention_fp8: rotate=True changes nothing")
    turned = [answer.rotated(t) for t in (q, k, v)]
    right = naive_attention(q, k, v)[0]
    wrong = {
        "q is rotated and k is not: (q M) k^T is another product": (turned[0], k, v),
        "k is rotated and q is not: q (k M)^T is another product": (q, turned[1], v),
        "v is rotated too: then o is, and nothing turns it back": (*turned[:2], turned[2]),
    }
    z = rounding_z(o, *turned[:2], v)
    if not z <= Z_MAX:
        mistakes = {sentence: naive_attention(*qkv)[0] for sentence, qkv in wrong.items()}
        hidden = torch.zeros(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
        for sentence, twice in (
            ("q and k are rounded before they are rotated: rotate them as they are", _rounded_rotated),
            ("codes are rotated: rotate q and k, and quantize what comes of it", _codes_rotated),
        ):
            rounded = *(twice(t, answer.rotated) for t in (q, k)), restored(*quantized(v))
            mistakes[sentence] = _attention(*rounded, 1 / q.shape[3] ** 0.5, hidden)
        nearest = min(mistakes, key=lambda sentence: (o - mistakes[sentence]).norm())
        near = (o - mistakes[nearest]).norm() < 0.3 * (o - right).norm()
        reject(f"attention_fp8, rotate=True: {nearest if near else f'o is {z:.1f} times as far off as it may be'}")


def _rounded_rotated(t, rotated):
    return restored(*quantized(rotated(restored(*quantized(t)).float())))


def _codes_rotated(t, rotated):
    codes, scales = quantized(t)
    return restored(rotated(codes).to(FP8), scales)
