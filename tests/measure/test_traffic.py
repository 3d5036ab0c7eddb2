"""Bytes moved: what the interpreter counts equals the formulas exactly, for every kernel and size."""

from common import make_qkv, make_tensor, runtime
from common.measure import traffic
from phase1_softmax import logsumexp, softmax_fused, softmax_online
from phase2_tiling import attention, attention_resident, attention_unfused, lesson, matmul
from phase2_tiling.tiling import MATMUL_BLOCK
from phase3_forward import attention_forward
from phase4_backward import attention_backward, bill

import pytest
import torch
from helpers import guarded, interpreted_only

FP16, FP32 = torch.float16, torch.float32
each_dtype = pytest.mark.parametrize("dtype", [FP16, FP32], ids=str)
pytestmark = interpreted_only


def matrix(rows, cols, dtype):
    return make_tensor((1, 1, rows, cols), dtype=dtype)[0, 0]


@each_dtype
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 100), (20, 1024), (5, 4096)])
@pytest.mark.parametrize(("fn", "sweeps"), [(softmax_fused, 1), (softmax_online, 2)])
def test_softmax(fn, sweeps, rows, cols, dtype):
    x = matrix(rows, cols, dtype)
    with traffic.measure(x=x) as moved:
        y = guarded(fn)(x)
    assert not y.isnan().any()
    assert moved.stored == y.nbytes
    assert moved.loaded_from["x"] == moved.loaded == sweeps * x.nbytes


@each_dtype
@pytest.mark.parametrize(("cols", "in_a_tile"), [(256, 16), (2048, 2), (4096, 1)])
def test_a_transposed_row_costs_a_sector_for_each_run_of_a_tile(cols, in_a_tile, dtype):
    contiguous = torch.zeros(64, cols, dtype=dtype, device=runtime.DEVICE)
    for x, run in ((contiguous, cols), (contiguous.t().contiguous().t(), in_a_tile)):
        with traffic.measure() as moved:
            softmax_fused(x)
        assert moved.loaded == x.nbytes
        assert moved.sectors == x.numel() // run * -(-run * dtype.itemsize // traffic.SECTOR)


def test_products_of_tiles_are_counted():
    q, k, v = make_qkv(1, 2, 100, 16, seq_k=70)
    tiles = runtime.tile_sizes(16, q.dtype)
    with traffic.measure() as moved:
        attention_forward(q, k, v)
    assert moved.products == 2 * 2 * -(-100 // tiles["BLOCK_M"]) * -(-70 // tiles["BLOCK_N"])


@each_dtype
def test_logsumexp_reads_once(dtype):
    x = matrix(33, 1500, dtype)
    with traffic.measure(x=x) as moved:
        logsumexp(x)
    assert (moved.loaded, moved.stored) == (x.nbytes, 33 * 4)


@each_dtype
@pytest.mark.parametrize(("m", "n", "k"), [(64, 64, 64), (1, 1, 1), (100, 70, 33), (130, 65, 200)])
def test_matmul(m, n, k, dtype):
    a, b = matrix(m, k, dtype), matrix(k, n, dtype)
    for out_dtype in (FP16, FP32):
        with traffic.measure(a=a, b=b) as moved:
            matmul(a, b, out_dtype=out_dtype)
        assert moved.loaded_from["a"] + moved.loaded_from["b"] == moved.loaded
        assert moved.loaded_from["a"] == a.nbytes * -(-n // MATMUL_BLOCK)
        sizes = dict(block_m=MATMUL_BLOCK, block_n=MATMUL_BLOCK, size=dtype.itemsize, out_size=out_dtype.itemsize)
        assert moved.total == lesson.matmul_bytes(m, n, k, **sizes)


@each_dtype
@pytest.mark.parametrize(("seq_q", "seq_k"), [(64, 64), (1, 100), (100, 1), (130, 150)])
def test_attention_of_one_head(seq_q, seq_k, dtype):
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, seq_q, 32, seq_k=seq_k, dtype=dtype))
    size, tiles = dtype.itemsize, runtime.tile_sizes(32, dtype)
    with traffic.measure() as unfused:
        attention_unfused(q, k, v)
    assert unfused.total == lesson.unfused_attention_bytes(seq_q, seq_k, 32, MATMUL_BLOCK, size)
    assert unfused.total >= lesson.least_unfused_attention_bytes(seq_q, seq_k, 32, size)

    with traffic.measure(q=q, k=k, v=v) as tiled:
        attention(q, k, v)
    assert tiled.loaded_from["q"] == q.nbytes
    assert tiled.loaded_from["k"] == tiled.loaded_from["v"] == k.nbytes * -(-seq_q // tiles["BLOCK_M"])
    blocks = dict(block_m=tiles["BLOCK_M"], block_n=tiles["BLOCK_N"])
    assert tiled.total == traffic.tiled_attention_bytes(seq_q, seq_k, 32, **blocks, size=size)

    with traffic.measure(q=q, k=k, v=v) as resident:
        o = attention_resident(q, k, v)
    programs, rest = divmod(resident.loaded_from["k"], k.nbytes)  # each reads all of k
    assert rest == 0
    assert resident.total == q.nbytes + programs * (k.nbytes + v.nbytes) + o.nbytes


@pytest.mark.parametrize(("seq_k", "sweeps"), [(4096, 1), (4100, 2)])
def test_rows_of_more_than_4096_scores_are_swept_twice(seq_k, sweeps):
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, 3, 16, seq_k=seq_k))
    with traffic.measure() as moved:
        attention_unfused(q, k, v)
    assert moved.total == lesson.unfused_attention_bytes(3, seq_k, 16, MATMUL_BLOCK, 2)
    tiles = -(-seq_k // MATMUL_BLOCK)
    scores = (3 * 16 * tiles + seq_k * 16) * 2 + 3 * seq_k * 4
    weighted = (3 * seq_k + seq_k * 16 + 3 * 16) * 2
    assert moved.total == scores + 3 * seq_k * (4 * sweeps + 2) + weighted


def test_the_least_is_every_matrix_once_a_step():
    inputs_and_output = (2 * 5 + 3 * 5 + 3 * 5 + 2 * 5) * 2  # q, k, v, o in 16 bits
    scores, weights = 2 * 3 * 4, 2 * 3 * 2  # each written by one step and read by the next
    assert lesson.least_unfused_attention_bytes(2, 3, 5, 2) == inputs_and_output + 2 * scores + 2 * weights


@each_dtype
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim"), [(64, 64, 32), (130, 150, 40), (150, 70, 16), (70, 150, 80), (7, 0, 16), (1, 1, 1)]
)
def test_trap51_attention_forward(seq_q, seq_k, head_dim, is_causal, dtype):
    q, k, v = make_qkv(2, 2, seq_q, head_dim, heads_kv=1, seq_k=seq_k, dtype=dtype)
    with traffic.measure(q=q) as moved:
        o, lse = guarded(attention_forward)(q, k, v, is_causal, enable_gqa=True)
    # Everything was written, and as many bytes as there are: each element once, so no two programs can race (trap 51).
    assert not o.isnan().any()
    assert not lse.isnan().any()
    assert moved.stored == o.nbytes + lse.nbytes
    assert moved.loaded_from["q"] == q.nbytes
    tiles = runtime.tile_sizes(head_dim, dtype)
    one_head = traffic.tiled_attention_bytes(
        seq_q, seq_k, head_dim, tiles["BLOCK_M"], tiles["BLOCK_N"], dtype.itemsize, is_causal=is_causal, lse=True
    )
    assert moved.total == 4 * one_head


def test_a_causal_mask_halves_what_is_read_of_k_and_v():
    q, k, v = make_qkv(1, 1, 512, 16)
    moved = {}
    for is_causal in (False, True):
        with traffic.measure(k=k) as moved[is_causal]:
            attention_forward(q, k, v, is_causal)
    tiles = 512 // runtime.tile_sizes(16, FP16)["BLOCK_M"]
    assert moved[True].loaded_from["k"] / moved[False].loaded_from["k"] == (tiles + 1) / (2 * tiles)


@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize(
    ("seq_q", "seq_k", "head_dim"), [(128, 128, 64), (200, 330, 64), (150, 70, 40), (70, 300, 200)]
)
def test_attention_backward(seq_q, seq_k, head_dim, is_causal):
    q, k, v = make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, dtype=torch.float16)
    o, lse = attention_forward(q, k, v, is_causal)
    tiles = runtime.tile_sizes(head_dim, q.dtype, backward=True)
    blocks = tiles["BLOCK_M"], tiles["BLOCK_N"]
    expected = bill.attention_backward_bytes(seq_q, seq_k, head_dim, *blocks, 2, is_causal=is_causal)
    for unwanted, kernels in (("needs_kv", ("delta", "dq")), ("needs_q", ("delta", "dkdv"))):
        with traffic.measure() as moved:
            attention_backward(q, k, v, o, lse, o, is_causal=is_causal, **{unwanted: False})
        assert moved.total == sum(expected[kernel] for kernel in kernels)


@pytest.mark.parametrize(("block_m", "block_n"), [(64, 16), (16, 64)])
def test_a_causal_walk_begins_with_a_whole_tile_of_queries(block_m, block_n):
    seen = [m for n in range(0, 200, block_n) for m in range(0, 128, block_m) if m + block_m > n]
    read = 2 * 200 * 4 * 64 + len(seen) * block_m * (4 * 64 + 8)
    assert bill.attention_backward_bytes(128, 200, 64, block_m, block_n, 2, is_causal=True)["dkdv"] == read


def test_backward_from_a_stored_p():
    seq_q, seq_k, head_dim = 130, 200, 64
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, dtype=torch.float16))
    p, do = softmax_fused(q @ k.T), torch.randn_like(q)
    with traffic.measure() as moved:
        matmul(p.T, do)
        ds = matmul(do, v.T, out_dtype=torch.float32).half()
        matmul(ds, k)
        matmul(ds.T, q)
    elementwise = seq_q * seq_k * (2 + 4 + 2)
    assert moved.total + elementwise == bill.stored_backward_bytes(seq_q, seq_k, head_dim, MATMUL_BLOCK, 2)


def test_nothing_is_counted_outside_the_block():
    from triton.runtime.interpreter import interpreter_builder as builder

    before = builder.create_masked_load, builder.create_masked_store
    x = matrix(3, 100, FP16)
    with traffic.measure() as moved:
        softmax_fused(x)
    with pytest.raises(ZeroDivisionError), traffic.measure():
        1 / 0  # noqa: B018
    assert (builder.create_masked_load, builder.create_masked_store) == before
    counted = moved.total
    softmax_fused(x)
    assert moved.total == counted


def test_measuring_refuses_where_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"), traffic.measure():
        pass


def test_two_names_of_one_memory_are_refused():
    packed = matrix(20, 32, FP16)
    with pytest.raises(ValueError, match="k: shares its memory with q"), traffic.measure(q=packed[:, :16], k=packed):
        pass


def test_what_holds_nothing_shares_no_memory():
    with traffic.measure(q=torch.empty(0, 16), k=torch.empty(0, 16)) as moved:
        pass
    assert moved.total == 0


def test_a_block_inside_a_block_is_counted_in_both():
    x = matrix(3, 100, FP16)
    with traffic.measure() as outer:
        softmax_fused(x)
        with traffic.measure() as inner:
            softmax_fused(x)
        softmax_fused(x)
    assert outer.total == 3 * inner.total == 3 * 2 * x.nbytes
