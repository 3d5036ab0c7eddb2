"""Checks the step on states of every kind, in PyTorch and in Triton, and the logsumexp that takes it along a row."""

import math

from common import runtime
from common.learn.check.require import after, reject, require
from phase1_softmax.checks import EXACT, INF, called, pair, randn, require_sane

import torch


def check(answer):
    _check_step("online_step", answer.online_step, torch.float64, EXACT)
    with after("online_step, in PyTorch"):
        _check_step("_online_step, in Triton", answer.row_state, torch.float32, dict(rtol=1e-4, atol=1e-5))

    x = 5 * randn(6, 200).double()
    x[2, :70] = x[3, 100:] = x[4] = -INF
    for cols in (1, 7, 64, 200):
        lse, right = answer.logsumexp(x, cols), torch.logsumexp(x, 1)
        require(f"logsumexp, {cols} columns at a time", lse, right, **EXACT)
    return "states of every kind, in PyTorch (fp64) and in Triton; rows in tiles of 1 to 200 columns"


def _check_step(name, step, dtype, tolerance):
    for what, *state in _states():
        m, l, s = (t.to(dtype).contiguous() for t in state)
        m_got, l_got = pair(f"{name}, {what}", called(step, m, l, s))
        state = (t.double() for t in (m, l, s))
        _require_state(f"{name}, {what}", m_got, l_got, *state, tolerance)
        if m_got.dtype != dtype or l_got.dtype != dtype:
            reject(f"{name}: m and l are {dtype} before, {m_got.dtype} and {l_got.dtype} after the step")
    for _, m, l, tile in _states()[2:4]:  # a later tile and a first one, of ordinary size
        m, l, s = m.to(dtype), l.to(dtype), tile.to(dtype).clone()
        s[1, 3] = math.nan
        l_got = pair(name, step(m, l, s))[1]
        if l_got.isnan().nonzero().flatten().tolist() != [1]:
            reject(f"{name}: with a NaN in row 1 of the tile, l must be NaN in row 1 and nowhere else")


def _states():
    """What to check a step on: (kind, m, l, tile)."""
    m, l = 3 * randn(6).double(), 1 + 9 * randn(6, seed=1).double().abs()
    tile = 3 * randn(6, 5, seed=2).double()
    fresh, none = torch.full_like(m, -INF), torch.zeros_like(l)
    nothing = torch.full_like(tile, -INF)
    some = tile.clone()
    some[::2, 1:] = some[1] = -INF
    mixed = torch.where(torch.arange(6, device=runtime.DEVICE) % 3 == 0, fresh, m)
    return [
        ("a tile with larger logits", m, l, tile + 10),
        ("a tile with smaller logits", m, l, tile - 20),
        ("a tile like those before", m, l, tile),
        ("the first tile", fresh, none, tile),
        ("the first tile, logits near -10000", fresh, none, tile - 10000),
        ("the first tile, logits near -20000", fresh, none, tile - 20000),
        ("a tile that is masked in part", mixed, l.where(mixed == m, 0.0), some),
        ("a tile of -inf", m, l, nothing),
        ("a first tile of -inf", fresh, none, nothing),
        ("a tile of one column", m, l, tile[:, :1] + 5),
    ]


def _require_state(what, m_got, l_got, m, l, tile, tolerance):
    """Reject unless (m_got, l_got) is the state (m, l) with the tile taken in."""
    own = tile.amax(1)
    m_new = torch.maximum(m, own)
    shift = torch.where(m_new == -INF, 0.0, m_new)
    new = torch.exp(tile - shift[:, None]).sum(1)
    of_m = {
        "this is the maximum of the tile alone: may it fall?": own,
        "this is the old maximum": m,
        "this is what is subtracted, 0 where the maximum is -inf: return the maximum itself as m": shift,
        "a maximum below 0 became 0: what does m start from?": torch.where(m_new == -INF, m_new, m_new.clamp(min=0)),
        "this is one maximum for all rows: which axis is reduced?": torch.maximum(m, tile.max()),
    }
    alpha, unshifted = torch.exp(m - shift), torch.exp(tile - own[:, None]).sum(1)
    against_old = torch.exp(tile - torch.where(m == -INF, 0.0, m)[:, None]).sum(1)
    old, l_new = l * alpha, l * alpha + new
    if _same(m_got, l_new) and _same(l_got, m_new):
        reject(f"{what}: m and l are exchanged: return m first, then l")
    require_sane(f"{what}: m", m_got, m_new)
    above = (m_got > m_new.max()).all()
    signs = {"does a number such as -1e4 stand for -inf? Every logit may lie below it": bool(above)}
    require(f"{what}: m", m_got, m_new, mistakes=of_m, signs=signs, **tolerance)
    guard_of_old = torch.where(m == -INF, 0.0, m_new)
    guarded = l * torch.exp(m - guard_of_old) + torch.exp(tile - guard_of_old[:, None]).sum(1)
    of_l = {
        "the guard asks whether the old maximum is -inf: the new one is subtracted": guarded,
        "the tile's sum is one number for all rows: which axis is summed?": old + new.sum(),
        "this is the LSE, m + log(l): return l": m_new + torch.log(l_new),
        "the old sum was measured against the old maximum: is it rescaled?": l + new,
        "the old sum is rescaled the wrong way around: it must never grow": l * torch.exp(shift - m) + new,
        "the tile is measured against its own maximum, not against the new one": old + unshifted,
        "the tile is measured against the old maximum, not against the new one": old + against_old,
        "the old sum is lost": new,
        "the tile's sum is rescaled too: it is measured against the new maximum already": (l + new) * alpha,
    }
    if _same(l_got, torch.zeros_like(l)) and tile.isfinite().all():
        reject(f"{what}: l is 0: what is subtracted lies far above every logit. Is it a number such as -1e4, not m?")
    nothing = m_new == -INF
    if nothing.any() and torch.equal(l_got.isnan(), nothing):
        reject(f"{what}: l is NaN in a row of -inf alone, as -inf - (-inf) is: what may be subtracted in place of m?")
    require_sane(f"{what}: l", l_got, l_new)
    require(f"{what}: l", l_got, l_new, mistakes=of_l, **tolerance)


def _same(actual, right):
    shapes = isinstance(actual, torch.Tensor) and actual.shape == right.shape
    return shapes and torch.allclose(actual.double(), right, rtol=1e-4, atol=1e-5)
