"""Codes and scales, to the bit where rounding allows only one code."""

from common import make_qkv, runtime
from phase5_tuning.fp8 import attention, quantize, reference
from phase5_tuning.fp8.quantize import E4M3, KEYS, QUERIES
from phase5_tuning.hopper.forward import columns_of

import pytest
import torch

FP16, BF16 = torch.float16, torch.bfloat16
CASES = [  # heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, layout, rotate, sign
    (2, 1, 100, 200, 64, BF16, "bhsd", True, 1),
    (2, 2, 65, 129, 128, FP16, "bshd", True, -1),
    (1, 1, 130, 64, 40, BF16, "transposed", True, 1),
    (1, 1, 70, 130, 100, FP16, "sliced", True, 1),
    (4, 2, 64, 1, 64, FP16, "bhsd", False, 1),
    (1, 1, 1, 140, 39, BF16, "bhsd", False, -1),
]


def by_kernel(q, k, v, rotate=True, sign=1):
    q, k, v = runtime.to_kernel_dtype(q, k, v)
    columns = columns_of(q.shape[3])
    with runtime.on_device_of(q):
        launch = quantize.plan(q, k, v, columns, rotate, sign)
        return attention.codes(launch, q, k, v, columns, rotate, sign)


def inputs(case):
    heads_q, heads_kv, seq_q, seq_k, head_dim, dtype, layout, *_ = case
    q, k, v = make_qkv(2, heads_q, seq_q, head_dim, heads_kv=heads_kv, seq_k=seq_k, dtype=dtype, layout=layout)
    for t in (q, k, v):  # tiles, heads and batches of other sizes
        t[:, :, : t.shape[2] // 2] *= 8
        t[0] *= 0.25
        t[1, -1] *= 3
    return q, k, v


def rows_of(t, rows):
    """The tiles of t: views of so many rows."""
    return t.split(rows, dim=2)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_queries_and_keys(case):
    q, k, v = inputs(case)
    rotate, sign = case[-2:]
    made = by_kernel(q, k, v, rotate, sign)
    columns = columns_of(q.shape[3])
    for codes, scales, t, rows in (
        (made.q, made.q_scale, sign * q, QUERIES.value),
        (made.k, made.kv_scale[..., 0], k, KEYS.value),
    ):
        x = torch.nn.functional.pad(t.double(), (0, columns - t.shape[3]))
        if rotate:
            x = x @ reference.rotation(columns, x.device)
        assert scales.shape[2] == len(rows_of(x, rows))
        for i, (tile, of_tile) in enumerate(zip(rows_of(x, rows), rows_of(codes, rows), strict=True)):
            scale = scales[:, :, i].double()
            torch.testing.assert_close(scale, tile.abs().amax((2, 3)) / 448, rtol=1e-6, atol=0)
            exact = tile / scale[..., None, None]
            # What a sum in fp32 may be off by, where the largest is 448.
            least, most = ((exact + off).float().to(E4M3).float() for off in (-2e-4, 2e-4))
            assert ((least <= of_tile.float()) & (of_tile.float() <= most)).all()
            assert (least == most).double().mean() > 0.98


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case):
    q, k, v = inputs(case)
    made = by_kernel(q, k, v, *case[-2:])
    head_dim = v.shape[3]
    for i, tile in enumerate(rows_of(v.double(), KEYS.value)):
        scale = made.kv_scale[:, :, i, 1].double()
        least = tile.abs().amax((2, 3)) / 448
        assert (scale.log2() % 1 == 0).all()
        assert ((least <= scale) & (scale < 2 * least)).all()
        right = torch.nn.functional.pad((tile / scale[..., None, None]).float(), (0, 0, 0, 128 - tile.shape[2]))
        of_tile = made.v[:, :, i * 128 :][:, :, :head_dim].float()
        for place in range(128):
            block, thread, which = place // 16, place % 16 // 4, place % 4
            key = 16 * block + 2 * thread + (0, 1, 8, 9)[which]
            assert torch.equal(of_tile[..., place], right[:, :, key].to(E4M3).float())


def test_the_same_as_pytorch_and_back():
    q, k, v = inputs(CASES[0])
    made, other = by_kernel(q, k, v), reference.quantize(q, k, v, 64, True, 1)
    for a, b in zip(reference.restored(made, 64), reference.restored(other, 64), strict=True):
        assert ((a - b).abs() > 1e-6 * b.abs()).double().mean() < 1e-3
    _, _, back = reference.restored(made, 64)
    assert ((back - v.double()).abs() <= 2.0**-4 * v.double().abs() + 2.0**-10 * made.kv_scale[..., 1].max()).all()


@pytest.mark.parametrize("columns", [64, 128])
def test_the_rotation_is_orthogonal_and_spreads_one_element_over_all_columns(columns):
    r = reference.rotation(columns)
    torch.testing.assert_close(r @ r.mT, torch.eye(columns, dtype=torch.float64), rtol=0, atol=1e-12)
    torch.testing.assert_close(r.abs(), torch.full_like(r, columns**-0.5))
    assert columns / 4 < (r[:, 0] > 0).sum() < 3 * columns / 4


def test_tiles_of_zeros_and_of_the_smallest_numbers():
    q, k, v = make_qkv(1, 1, 130, 64, seq_k=300, dtype=BF16)
    q[:, :, :64], k[:, :, :128], v[:, :, :128] = 0, 0, 0
    q[:, :, 64:], k[:, :, 128:256], v[:, :, 128:256] = 1e-38, 1e-38, 1e-38
    made = by_kernel(q, k, v)
    assert all(t.float().isfinite().all() for t in (made.q, made.k, made.v[:, :, :64], made.q_scale))
    assert (made.q_scale > 0).all()
    assert (made.kv_scale > 0).all()
    q_back, k_back, v_back = reference.restored(made, 64)
    assert (q_back[:, :, :64] == 0).all()
    assert (k_back[:, :, :128] == 0).all()
    assert (v_back[:, :, :256] == 0).all()


def test_what_no_scale_fits_is_nan():
    q, k, v = make_qkv(1, 1, 64, 64, seq_k=256, dtype=BF16)
    v[0, 0, 3, 5] = float("inf")
    v[0, 0, 200, 5] = 1e20
    _, _, back = reference.restored(by_kernel(q, k, v), 64)
    assert back.isnan().all()
    v[0, 0, 200, 5] = 5e16
    _, _, back = reference.restored(by_kernel(q, k, v), 64)
    assert back[:, :, 128:].isfinite().all()


@pytest.mark.parametrize("rotate", [False, True])
def test_nan_and_infinite_queries_stay_in_their_tile(rotate):
    q, k, v = make_qkv(1, 1, 128, 64, dtype=BF16)
    q[0, 0, 3, 5] = float("nan")
    k[0, 0, 3, 5] = float("inf")
    q_back, k_back, _ = reference.restored(by_kernel(q, k, v, rotate), 64)
    row = q_back[0, 0, 3].isnan()
    assert row.all() if rotate else row[5]
    assert q_back[0, 0].isnan().sum() == row.sum()
    assert k_back[0, 0, 3].isnan().any()
