"""A hint names a mistake only where its result, computed, is the one at hand: on other inputs than the table's, in
kernels that are written in other ways than the emulator, and never for what is wrong in ways that are not known.
"""

import functools
import math
import random
import re
from dataclasses import replace

from common.verify import verify_results
from common.verify.harness import DIFFERENT
from common.verify.inputs import make_qkv
from common.verify.mistakes import hypotheses, trial
from common.verify.mistakes.emulator import Steps, emulate
from common.verify.mistakes.rules import verify
from common.verify.mistakes.table import BF16, FP16, FP32, MISTAKES, Case
from common.verify.mistakes.wrong_steps import with_strides

import pytest
import torch
from tests.verify.test_verify import HINTS, WRONG

torch.set_num_threads(1)

SENTENCES = {
    name: re.compile(re.sub(r"\\\{\w+\\\}", ".*", re.escape(m.hint))) for name, m in MISTAKES.items() if m.hint
}


def named(hint: str) -> set[str]:
    """The sentences of the table that a hint holds."""
    return {MISTAKES[name].hint for name, sentence in SENTENCES.items() if sentence.search(hint)}


# --- the table's mistakes on other inputs -------------------------------------------------------------------------

# Whose case is what makes them matter: the dtype, or tensors of one shape.
OF_A_DTYPE = ("p_through_bf16", "inputs_rounded", "acc_bf16", "s_unscaled", "o_through_bf16")
# Told by the numbers or the place, not by name.
IN_OTHER_WORDS = dict(one_element="elements wrong, the rest right", lse_16_bits="number: was it rounded")
WORDS = {name: re.sub(r" \(tiles of .*", "", words) for name, words in (HINTS | IN_OTHER_WORDS).items()}


def varied(name, seed) -> Case:
    """The case of a mistake with other sizes and numbers."""
    case, draw = MISTAKES[name].case, random.Random(f"{name} {seed}")
    change = dict(seed=seed, batch=draw.choice((1, 2)) if name != "batch_first" else 3)
    change |= dict(seq_q=draw.choice((33, 64, 97)), head_dim=draw.choice((16, 32, 64)))
    if case.seq_k >= 1000:  # every turn of the loop costs
        change |= dict(batch=1, seq_q=33)
    else:
        change |= dict(seq_k=change["seq_q"] if name == "dq_dk_swapped" else draw.choice((72, 100, 110)))
    if case.heads_kv is None:
        change |= dict(heads_q=draw.choice((2, 3)))
    if name not in OF_A_DTYPE:
        change |= dict(dtype=draw.choice((FP16, FP32)))
    if name.startswith("max_"):  # how far exp underflows depends on them
        change |= dict(head_dim=case.head_dim, dtype=case.dtype)
    if name == "last_tile_skipped":
        change |= dict(seq_k=draw.choice((64, 96, 128)))
    if name == "scale_padded":
        change |= dict(head_dim=draw.choice((8, 24, 40, 72)))
    return replace(case, **change)


@pytest.mark.slow
@pytest.mark.parametrize("name", WRONG)
def test_a_mistake_is_named_on_other_inputs(name):
    missed = []
    for seed in (10, 11):
        report = verify(varied(name, seed), MISTAKES[name].attention)
        if report.passed:
            continue
        if WORDS[name] in report.hint:
            return
        missed.append(report.hint)
        assert not named(report.hint), missed  # another one, and not this
    assert not missed


# --- kernels in other styles --------------------------------------------------------------------------------------


def unfused(q, k, v, *, is_causal, scale, enable_gqa, logits=None, mask=None):
    """S, P and O in full, in fp32. Returns (o, lse)."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    s = logits(q, k, scale) if logits else scale * (q.float() @ k.float().mT)
    visible = (mask or (lambda i, j: j <= i if is_causal else j >= 0))(*indices(s))
    s = s.masked_fill(~visible, -math.inf)
    return (torch.softmax(s, dim=-1) @ v.float()).to(q.dtype), torch.logsumexp(s, dim=-1)


def indices(s):
    return torch.arange(s.shape[-2])[:, None], torch.arange(s.shape[-1])[None, :]


def in_base_2(q, k, v, *, is_causal, scale, enable_gqa, logits=None, in_loop=lambda acc, l: acc, rescale=True):
    """A loop over tiles of 64 keys without padding, in exp2."""
    scale = q.shape[-1] ** -0.5 / math.log(2)
    m, l, acc = torch.full(q.shape[:-1], -math.inf), torch.zeros(q.shape[:-1]), torch.zeros(q.shape)
    for start in range(0, k.shape[2], 64):
        k_tile, v_tile = (t[:, :, start : start + 64] for t in (k, v))
        s = logits(q, k_tile, scale) if logits else scale * (q.float() @ k_tile.float().mT)
        if is_causal:
            i, j = indices(s)
            s = s.masked_fill(j + start > i, -math.inf)
        m_new = torch.maximum(m, s.amax(dim=-1))
        alpha, p = torch.exp2(m - m_new), torch.exp2(s - m_new[..., None])
        l = alpha * l + p.sum(dim=-1)
        acc = in_loop(
            (alpha[..., None] * acc if rescale else acc) + p.to(q.dtype).float() @ v_tile.float(), l[..., None]
        )
        m = m_new
    return (acc / l[..., None]).to(q.dtype), (m + torch.log2(l)) * math.log(2)


def with_strides_of(others):
    """unfused on tensors that are read with strides of other ones. others: {tensor: other, or "" for contiguous}."""

    def fn(q, k, v, **options):
        given = dict(q=q, k=k, v=v)
        contiguous = {name: torch.empty(t.shape).stride() for name, t in given.items()}
        strides = {name: given[other].stride() if other else contiguous[name] for name, other in others.items()}
        read = {name: with_strides(given[name], strides[name]) for name in others}
        return unfused(*(given | read).values(), **options)

    return fn


def split(q, k, v, *, is_causal, scale, enable_gqa, parts, merge):
    """Parts of the keys, each normalized, then merged: merge(o, m, lse) of all parts, stacked."""
    s = q.shape[-1] ** -0.5 * (q.float() @ k.float().mT)
    size = math.ceil(k.shape[2] / parts)
    o, m, lse = (
        torch.stack(of_parts)
        for of_parts in zip(
            *(
                (torch.softmax(of_s, dim=-1) @ of_v.float(), of_s.amax(-1), torch.logsumexp(of_s, -1))
                for of_s, of_v in zip(s.split(size, dim=3), v.split(size, dim=2), strict=True)
            ),
            strict=True,
        )
    )
    return merge(o, m, lse).to(q.dtype), torch.logsumexp(lse, dim=0)


def by_maxima(o, m, lse):
    return (torch.softmax(m, dim=0)[..., None] * o).sum(dim=0)


def with_base(q, k, v, **options):
    """Heads of k and v are looked for at (batch * heads + head) strides of heads."""
    strides = [(t.shape[1] * t.stride(1), *t.stride()[1:]) for t in (k, v)]
    return unfused(q, *(t.as_strided(t.shape, stride) for t, stride in zip((k, v), strides, strict=True)), **options)


def walk(q, k, v, *, is_causal, scale, enable_gqa, tile, of_v=lambda tile: tile):
    """S, and values as they are read in each turn of a loop over tiles of keys."""
    s = q.shape[-1] ** -0.5 * (q.float() @ k.float().mT)
    values = torch.cat([v[:, :, of_v(turn) * tile :][:, :, :tile] for turn in range(k.shape[2] // tile)], dim=2)
    return (torch.softmax(s, dim=-1) @ values.float()).to(q.dtype), torch.logsumexp(s, dim=-1)


def stored_as_bshd(q, k, v, **options):
    o, lse = unfused(q, k, v, **options)
    return o.transpose(1, 2).reshape(o.shape), lse


def modulo(q, k, v, **options):
    return unfused(q, *(t.repeat(1, q.shape[1] // t.shape[1], 1, 1) for t in (k, v)), **options)


def bottom_right(i, j):
    return j <= i + j.shape[1] - i.shape[0]


def k_in_16_bits(q, k, scale):
    return q.float() @ (scale * k).to(q.dtype).float().mT


def q_in_16_bits(q, k, scale):
    return (scale * q).to(q.dtype).float() @ k.float().mT


def s_in_16_bits(q, k, scale):
    return scale * (q @ k.mT).float()


TOP_LEFT = functools.partial(unfused, mask=lambda i, j: j <= i)
BOTTOM_RIGHT = functools.partial(unfused, mask=bottom_right)
DIVIDES = functools.partial(in_base_2, in_loop=lambda acc, l: acc / l)
CAUSAL = dict(is_causal=True)
STYLES = dict(
    scale=(functools.partial(unfused, logits=lambda q, k, _: q.float() @ k.float().mT), {}, "the scale is missing"),
    always_causal=(TOP_LEFT, {}, "applied though is_causal is False"),
    bottom_right=(BOTTOM_RIGHT, CAUSAL, "aligned bottom-right"),
    bottom_right_nan=(BOTTOM_RIGHT, CAUSAL | dict(seq_q=100, seq_k=70), "aligned bottom-right"),
    bottom_right_unasked=(BOTTOM_RIGHT, {}, "applied though is_causal is False"),
    divides=(DIVIDES, {}, "in every turn of the loop (tiles of 64)"),
    divides_causal=(DIVIDES, CAUSAL, "in every turn of the loop (tiles of 64)"),
    not_rescaled=(functools.partial(in_base_2, rescale=False), {}, "accumulator is not rescaled"),
    contiguous=(with_strides_of(dict(q="", k="", v="")), dict(layout="bshd"), "q, k and v are read as if contiguous"),
    contiguous_k=(with_strides_of(dict(k="")), dict(layout="transposed", layout_v="bshd"), "k is read as if contig"),
    v_by_k=(with_strides_of(dict(v="k")), dict(layout="bshd", layout_v="transposed"), "v is read by the strides of k"),
    k_by_v=(with_strides_of(dict(k="v")), dict(layout="bshd", layout_v="transposed"), "k is read by the strides of v"),
    swapped=(lambda q, k, v, **options: unfused(q, v, k, **options), {}, "k and v are swapped"),
    stored_as_bshd=(stored_as_bshd, {}, "stored as (batch, seq, heads, head_dim)"),
    split=(functools.partial(split, parts=3, merge=by_maxima), {}, "weights exp(m) of their maxima (parts of 34 keys)"),
    split_alike=(functools.partial(split, parts=4, merge=lambda o, m, lse: o.mean(0)), {}, "merged by equal weights"),
    split_added=(functools.partial(split, parts=2, merge=lambda o, m, lse: o.sum(0)), {}, "added without weights"),
    with_base=(with_base, dict(batch=2, layout="bshd"), "k and v are read at (batch * heads + head) times"),
    still=(functools.partial(walk, tile=32, of_v=lambda _: 0), dict(seq_k=96), "rows of v are those of the first tile"),
    modulo=(modulo, dict(heads_q=6, heads_kv=2), "h % heads_kv"),
    k_rounded=(functools.partial(in_base_2, logits=k_in_16_bits), dict(kind="large"), "k * scale is rounded"),
    k_rounded_low=(functools.partial(unfused, logits=k_in_16_bits), dict(kind="low"), "k * scale is rounded"),
    q_rounded=(functools.partial(in_base_2, logits=q_in_16_bits), dict(kind="large"), "q * scale is rounded"),
    s_rounded=(functools.partial(unfused, logits=s_in_16_bits), dict(kind="peaked"), "S is rounded to float16"),
)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", [FP16, FP32])
def test_a_mistake_is_named_in_another_style(style, dtype):
    fn, given, words = STYLES[style]
    options = dict(is_causal=given.get("is_causal", False), enable_gqa="heads_kv" in given)
    sizes = dict(heads_q=3, seq_q=70, seq_k=100, head_dim=32, dtype=dtype, seed=3)
    sizes |= {name: value for name, value in given.items() if name != "is_causal"}
    report = verify_results(fn, *make_qkv(**sizes), **options, compare_sdpa=False)
    if dtype == FP32 and "rounded" in style:
        assert report.passed  # rounding to the input dtype is none
    else:
        assert words in report.hint


def test_strides_that_lead_out_of_memory_are_not_tried():
    """Heads that share one memory: as if contiguous they would need more of it."""
    q, k, v = make_qkv(1, 2, 40, 16)
    k = k[:, :1].clone().expand_as(k)
    context = hypotheses.Context(q, k, v, None, False, 0.25)
    assert not [h for h in hypotheses.of_forward("o", context) if "read as if contiguous" in h.sentence]
    assert [h for h in hypotheses.of_forward("o", context) if "q is read by the strides of k" in h.sentence]
    with pytest.raises(IndexError, match="lead out of the memory"):
        with_strides(k, torch.empty(k.shape).stride())


# --- what cannot be told apart ------------------------------------------------------------------------------------


def test_mistakes_that_give_the_same_numbers_are_named_together():
    """A v that is read by k's strides, which are q's too."""
    q, k, v = make_qkv(1, 3, 70, 32, layout="bshd", layout_v="transposed")
    hint = verify_results(with_strides_of(dict(v="k")), q, k, v).hint
    assert hint.count("v is read by the strides of") == 2
    assert "of q: a tensor comes with strides of its own; or v" in hint


def test_tiles_that_give_the_same_numbers_are_named_together():
    fn = functools.partial(emulate, steps=Steps(loop_end=lambda seq_k: seq_k // 32 * 32))
    for seq_k, tiles in ((100, "16 or 32"), (120, "32"), (79, "16, 32 or 64")):
        hint = verify_results(fn, *make_qkv(1, 2, 40, 32, seq_k=seq_k), compare_sdpa=False).hint
        assert f"dropped (tiles of {tiles})" in hint, seq_k


def test_a_mistake_that_explains_less_is_not_named_beside_the_right_one():
    first, second = (hypotheses.Hypothesis(sentence, {}) for sentence in ("this", "that"))
    assert trial._worded([(0.01, first), (0.3, second)]) == "this"
    assert trial._worded([(0.01, first), (0.012, second)]) == "this; or that"


def test_a_mistake_of_precision_explains_most_of_the_rows_that_are_wrong():
    """One row with most of the error is not enough."""
    truth = torch.zeros(1, 1, 40, 16, dtype=torch.float64)
    error = 5 * torch.ones_like(truth)
    error[:, :, 0] = 1000
    result = trial.Trial("o", error, truth, error > 0, None)
    for explained, found in ((40, True), (35, True), (10, False)):
        candidate = torch.where(torch.arange(40)[:, None] < explained, error, -error)
        assert trial._in_most_rows(result, candidate, torch.ones_like(truth), 8) is found


# --- what is not known --------------------------------------------------------------------------------------------


def normal(t, seed=1):
    return torch.randn(t.shape, generator=torch.Generator().manual_seed(seed)).to(t)


def with_o(change):
    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        o, lse = emulate(q, k, v, is_causal=is_causal, scale=scale)
        return change(o.float()).to(o.dtype), lse

    return fn


def with_inputs(change):
    def fn(q, k, v, *, is_causal, scale, enable_gqa):
        return emulate(*change(q, k, v), is_causal=is_causal, scale=scale)

    return fn


def stepping(**steps):
    return functools.partial(emulate, steps=Steps(**steps))


def to_bits(t, bits):
    mantissa, exponent = torch.frexp(t)
    return torch.ldexp((mantissa * 2**bits).round() / 2**bits, exponent)


def softcap(q, k, scale, product, dtype):
    return 2 * torch.tanh(scale * product(q, k.mT) / 2)


def coarse(q, k, scale, product, dtype):
    return (64 * scale * product(q, k.mT)).round() / 64


UNKNOWN = dict(
    noise=with_o(lambda o: o + 1e-2 * normal(o)),
    much_noise=with_o(lambda o: o + 0.3 * normal(o)),
    nothing_but_noise=with_o(normal),
    relative_noise=with_o(lambda o: o * (1 + 0.02 * normal(o))),
    rows_of_other_sizes=with_o(lambda o: o * (1 + 0.1 * normal(o[..., :1]))),
    mixed_rows=with_o(lambda o: 0.9 * o + 0.1 * o.roll(1, dims=2)),
    rolled=with_o(lambda o: o.roll(1, dims=2)),
    values_permuted=with_inputs(lambda q, k, v: (q, k, v[:, :, normal(v)[0, 0, :, 0].argsort()])),
    values_reversed=with_inputs(lambda q, k, v: (q, k, v.flip(2))),
    keys_rolled=with_inputs(lambda q, k, v: (q, k.roll(1, dims=2), v)),
    columns_reversed=with_inputs(lambda q, k, v: (q, k.flip(3), v)),
    values_in_seven_bits=with_inputs(lambda q, k, v: (q, k, to_bits(v.float(), 7).to(v.dtype))),
    softcap=stepping(logits=softcap),
    coarse_logits=stepping(logits=coarse),
    scale_off=stepping(scale=lambda scale, d: 1.05 * scale),
    two_keys_too_many=stepping(causal=lambda _: True, visible=lambda i, j, m, n: j <= i + 2),
    window=stepping(causal=lambda _: True, visible=lambda i, j, m, n: (j <= i) & (j > i - 7)),
    keys_left_out=stepping(in_bounds=lambda j, n: (j < n) & (j % 7 != 3)),
    sum_too_large=stepping(normalize=lambda acc, l: acc / (l + 1)),
    p_in_six_bits=stepping(round_p=lambda p, dtype: to_bits(p, 6)),
    exp_off=stepping(exp=lambda x: torch.exp(x) * (1 + 1e-2 * torch.sin(50 * x.clamp(min=-100)))),
)
UNKNOWN_BACKWARD = dict(
    ds_in_six_bits=stepping(round_ds=lambda ds, dtype: to_bits(ds, 6)),
    ds_noise=stepping(round_ds=lambda ds, dtype: ds * (1 + 0.01 * normal(ds))),
    delta_half=stepping(delta=lambda delta, l, dtype: delta / 2),
    delta_two_rows_off=stepping(delta=lambda delta, l, dtype: delta.roll(2, dims=-1)),
    lse_noise=stepping(saved_lse=lambda lse, m: lse + 0.01 * normal(lse)),
    dk_rolled=stepping(store_gradients=lambda dq, dk, dv: (dq, dk.roll(1, dims=2), dv)),
    dk_and_dv_swapped=stepping(store_gradients=lambda dq, dk, dv: (dq, dv, dk)),
    p_squared=stepping(dv_weights=lambda p, ds: p * p),
    p_missing=stepping(ds=lambda p, dp, delta: dp - delta),
)


@pytest.mark.parametrize("unknown", [*UNKNOWN, *UNKNOWN_BACKWARD])
def test_no_mistake_is_named_for_what_is_wrong_in_another_way(unknown):
    failed = 0
    for seed in range(3):
        draw = random.Random(f"{unknown} {seed}")
        heads_kv = draw.choice((1, 2))
        case = Case(
            heads_q=heads_kv * draw.choice((1, 2)),
            heads_kv=heads_kv,
            seq_q=draw.choice((20, 40, 64, 97)),
            seq_k=draw.choice((20, 64, 72, 100)),
            head_dim=draw.choice((16, 32, 64)),
            dtype=draw.choice((FP16, FP32)),
            kind=draw.choice(("normal", "normal", "positive", "peaked", "large")),
            is_causal=draw.random() < 0.4,
            grad=unknown in UNKNOWN_BACKWARD,
            seed=seed,
        )
        report = verify(case, (UNKNOWN | UNKNOWN_BACKWARD)[unknown])
        if not report.passed:
            failed += 1
            assert report.hint != DIFFERENT
            assert not named(report.hint), f"{case}\n{report.hint}"
    assert failed >= 2


@pytest.mark.parametrize("name", ["scale_missing", "causal_bottom_right", "tail_unmasked", "k_v_swapped", "delta_zero"])
@pytest.mark.parametrize("part", [0.02, 0.2])
def test_a_known_mistake_is_not_named_for_a_result_that_is_only_near_it(name, part):
    """The mistake takes most of the error away, and not all."""
    mistake = MISTAKES[name]

    def bent(t):
        return (t.float() * (1 + part * normal(t))).to(t.dtype)

    change = mistake.change | dict(store=lambda o, seq_q: o if mistake.case.grad else bent(o))
    change |= dict(store_gradients=lambda *gradients: tuple(map(bent, gradients)))
    for dtype in (FP16, BF16, FP32):
        report = verify(replace(mistake.case, dtype=dtype), stepping(**change))
        wrong = [r for r in report.results if not r.passed and r.name != "lse"]  # the LSE shows the mistake alone
        assert wrong
        assert not any(named(r.hint) for r in wrong), report


# --- place, size, and what is not finite --------------------------------------------------------------------------


def test_heads_that_are_nan_throughout_are_told_before_their_rows():
    q, k, v = make_qkv(1, 4, 70, 32, heads_kv=2)

    def past_the_keys(q, k, v, **options):
        o, lse = unfused(q, k, v, **options)
        o[:, 2:], lse[:, 2:] = math.nan, math.nan
        return o, lse

    report = verify_results(past_the_keys, q, k, v, enable_gqa=True)
    for result in report.results:
        assert "no element of (batch, head) (0, 2), (0, 3) is finite, all others are" in result.hint
        assert "h // (heads_q / heads_kv)" in result.hint

    def in_the_tail_too(q, k, v, **options):
        o, lse = past_the_keys(q, k, v, **options)
        o[:, 0, 64:] = math.nan
        return o, lse

    hint = verify_results(in_the_tail_too, q, k, v, enable_gqa=True)["o"].hint
    assert "first non-finite value in row 64" in hint


@pytest.mark.parametrize(
    ("is_nan", "says"),
    [
        (
            lambda i: i % 32 < 16,
            "the last tile before the diagonal's end, as if it came first (BLOCK_M x BLOCK_N = 32 x 16)",
        ),
        (lambda i: i < 64, "the last tile or part of the keys (of 32 or 64 keys), as if it came first or were merged"),
        (lambda i: i < 5, "just those rows are NaN that see no key under a causal mask aligned bottom-right"),
        (lambda i: i % 32 < 15, "is it -inf where a row has seen no key yet (exp(-inf - -inf) is NaN)"),
    ],
    ids=["backwards", "not skipped", "bottom-right", "another"],
)
def test_rows_that_meet_a_hidden_tile_first_are_told_where_just_they_are_nan(is_nan, says):
    def fn(q, k, v, **options):
        rows = is_nan(torch.arange(q.shape[2]))
        o, lse = unfused(q, k, v, **options)
        return o.masked_fill(rows[:, None], math.nan), lse.masked_fill(rows, math.nan)

    q, k, v = make_qkv(1, 2, 96, 32, seq_k=91 if "bottom" in says else 96)
    report = verify_results(fn, q, k, v, is_causal=True, compare_sdpa=False)
    for result in report.results:
        assert says in result.hint
        assert result.hint.startswith("just those rows are NaN") == ("just" in says or "as if" in says)

    def elsewhere_too(q, k, v, **options):
        o, lse = fn(q, k, v, **options)
        return o.index_fill(2, torch.tensor([70]), 1.0), lse

    assert not verify_results(elsewhere_too, q, k, v, is_causal=True)["o"].hint.startswith("just those")


def test_the_hint_of_a_report_is_the_first_that_names_something():
    def store_gradients(dq, dk, dv):
        return dq + normal(dq), dk, 0 * dv

    case = MISTAKES["dq_last_tile"].case
    report = verify(case, stepping(store_gradients=store_gradients))
    assert "no mistake known here explains" in report["dq"].hint
    assert report.hint == report["dv"].hint
    report = verify(case, stepping(store_gradients=lambda *gradients: tuple(t + normal(t) for t in gradients)))
    assert report.hint == report["dq"].hint


def test_a_nan_elsewhere_is_not_explained_by_a_mask():
    """Bottom-right, where rows that see no key are NaN in many kernels; here one is that sees some."""
    q, k, v = make_qkv(1, 2, 100, 32, seq_k=70)
    assert "bottom-right" in verify_results(BOTTOM_RIGHT, q, k, v, is_causal=True).hint

    def another(q, k, v, **options):
        o, lse = BOTTOM_RIGHT(q, k, v, **options)
        return o.index_fill(2, torch.tensor([80]), math.nan), lse

    assert not named(verify_results(another, q, k, v, is_causal=True).hint)


@pytest.mark.parametrize("dtype", [FP16, FP32])
@pytest.mark.parametrize(
    "change",
    [
        lambda o: torch.cat([2.427 * o[:, :, :40], o[:, :, 40:]], dim=2),
        lambda o: torch.where(o > 0, 2.427 * o, 2 * o),
        lambda o: 2.427 * o + 0.05 * normal(o),
        lambda o: torch.cat([-1e-9 * o[:, :1], o[:, 1:]], dim=1),
        lambda o: 1e-6 * normal(o),
    ],
    ids=["some rows", "two factors", "about", "tiny", "nothing left"],
)
def test_a_factor_is_told_only_where_it_explains_all_elements(change, dtype):
    report = verify_results(with_o(change), *make_qkv(1, 2, 70, 32, dtype=dtype))
    assert "times the truth" not in report["o"].hint
    assert "too few digits" not in report["o"].hint


def test_a_factor_that_explains_all_elements_is_told():
    report = verify_results(with_o(lambda o: 2.427 * o), *make_qkv(1, 2, 70, 32))
    assert report.hint == "all elements of o are 2.427 times the truth: which one is it?"
    report = verify_results(
        lambda *a, **b: (emulate(*a, **b)[0], 1.0005 * emulate(*a, **b)[1]), *make_qkv(1, 2, 70, 32)
    )
    assert report.hint == "all elements of lse are off by 0.0005 of their size: a constant with too few digits?"


@pytest.mark.parametrize("kind", ["normal", "peaked", "large", "low"])
@pytest.mark.parametrize("seed", range(4))
def test_no_place_is_told_for_an_error_that_is_only_of_precision(kind, seed):
    """It exceeds the limit here and there, in the rows in which it matters."""
    case = Case(heads_q=4, seq_q=70, kind=kind, seed=seed)

    def about(q, k, scale, product, dtype):
        s = scale * product(q, k.mT)
        return s * (1 + 1e-3 * normal(s))

    report = verify(case, stepping(logits=about))
    assert not report.passed
    for result in report.results:
        assert not re.search("only|rows|columns|elements wrong|times the truth", result.hint), result.hint
