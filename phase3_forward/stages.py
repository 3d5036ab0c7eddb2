"""The kernel while it grows, and wrong forms of it, by name: the module's source with lines replaced.

stage("heads")["_attn_fwd_kernel"]      one version of the kernel, to be shown or compared
with stage("heads"): ...                inside, `attention_forward` launches it
try_columns({1, 3})                     what a kernel does that says BLOCK_D in these places
tried(stage("mask"))                    a version's report on a causal call, and the tiles of keys that it visits
verdict_far_apart("heads")              a version's verdict where offsets need 64 bits
"""

import math
import tempfile
from unittest import mock

from common import make_qkv, runtime, verify_results
from common.edited import Stage
from common.measure import traffic
from phase3_forward import forward

import torch

KERNEL, STEP, HEAD = "_attn_fwd_kernel", "attention_tile_step", "head_base"

# What each feature added, and what stood there before.
_HEADS = (
    """    tiles_m = tl.cdiv(seq_q, BLOCK_M)
    pid_m = tl.program_id(0) % tiles_m
    pid_bh = tl.program_id(0) // tiles_m
    q_head = head_base(q_ptr, stride_q, pid_bh, heads_q)
    # `group` query heads share one key head.
    k_head = head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)
    v_head = head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)
    o_head = head_base(o_ptr, stride_o, pid_bh, heads_q)
""",
    """    pid_m = tl.program_id(0)
    q_head, k_head, v_head, o_head = q_ptr, k_ptr, v_ptr, o_ptr
""",
)
_COLUMNS = ("offs_d = tl.arange(0, BLOCK_D)", "offs_d = tl.arange(0, HEAD_DIM)")
_SHAPES = [(f"# ({rows}, BLOCK_D)", f"# ({rows}, HEAD_DIM)") for rows in ("BLOCK_M", "BLOCK_N")]
_STATE = ("acc = tl.zeros((BLOCK_M, BLOCK_D)", "acc = tl.zeros((BLOCK_M, HEAD_DIM)")
BOUND = (
    """    if IS_CAUSAL:  # keys after this tile's last query are seen by none of its rows
        end_n = tl.minimum(seq_k, (pid_m + 1) * BLOCK_M)
""",
    "",
)
MASK = (
    """        if IS_CAUSAL:  # as in SDPA, rows and columns are counted from the top left
            visible = visible & (offs_m[:, None] >= offs_n[None, :])
""",
    "",
)
_LSE = ("    tl.store(lse_ptr + pid_bh.to(tl.int64) * seq_q + offs_m, m_i + tl.log(l_safe), mask=offs_m < seq_q)\n", "")
_EMPTY = (
    "    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # a row that saw no key: o = 0, lse = -inf\n",
    """    # After the loop, as in phase 2.
    l_safe = tl.where(l_i == 0.0, 1.0, l_i)  # no keys at all: o = 0
""",
)
_FEATURES = dict(heads=[_HEADS], head_dim=[_COLUMNS, _STATE, *_SHAPES], mask=[BOUND, MASK], lse=[_EMPTY, _LSE])
# The kernel grows from the first of these to the last, which is the module's.
GROWTH = ("phase 2", "heads", "head_dim", "mask", "lse")

_VISIBLE = "visible = (offs_n < seq_k)[None, :]"
_INSIDE = "(offs_n < seq_k)[:, None] & (offs_d < HEAD_DIM)[None, :]"
_WRONG = {
    "heads one after another": [
        (KERNEL, "head_base(q_ptr, stride_q, pid_bh, heads_q)", "q_ptr + pid_bh * seq_q * HEAD_DIM"),
        (
            KERNEL,
            "head_base(k_ptr, stride_k, pid_bh // group, heads_q // group)",
            "k_ptr + pid_bh // group * seq_k * HEAD_DIM",
        ),
        (
            KERNEL,
            "head_base(v_ptr, stride_v, pid_bh // group, heads_q // group)",
            "v_ptr + pid_bh // group * seq_k * HEAD_DIM",
        ),
    ],
    "offsets of 32 bits": [(HEAD, "heads).to(tl.int64) * stride[0]", "heads) * stride[0]")],
    "key heads by remainder": [
        (KERNEL, f"stride_{x}, pid_bh // group,", f"stride_{x}, pid_bh // heads_q * 2 + pid_bh % 2,")
        for x in "kv"  # of two key heads
    ],
    "scale of the tile": [(KERNEL, "q, k, v, scale, visible)", "q, k, v, BLOCK_D**-0.5, visible)")],
    "values past the end are infinite": [
        (KERNEL, _VISIBLE, f'v = tl.where((offs_n < seq_k)[:, None], v, float("inf"))\n        {_VISIBLE}')
    ],
    "keys past the end are visible": [(KERNEL, _VISIBLE, "visible = (offs_n >= 0)[None, :]")],
    "loop bound without a mask": [(KERNEL, *MASK)],
    "diagonal hidden": [(KERNEL, "offs_m[:, None] >= offs_n", "offs_m[:, None] > offs_n")],
    "mask the wrong way round": [(KERNEL, "offs_m[:, None] >= offs_n", "offs_m[:, None] <= offs_n")],
    "loop ends a tile early": [(KERNEL, "(pid_m + 1) * BLOCK_M)", "pid_m * BLOCK_M)")],
    "K padded with NaN": [(KERNEL, _VISIBLE, f"k = tl.where({_INSIDE}, k, float('nan'))\n        {_VISIBLE}")],
    "bottom-right, no guard in the loop": [
        (KERNEL, "(pid_m + 1) * BLOCK_M)", "(pid_m + 1) * BLOCK_M + seq_k - seq_q)"),
        (KERNEL, "(offs_m[:, None] >=", "(offs_m[:, None] + seq_k - seq_q >="),
        (
            STEP,
            "    m_i, l_i, alpha, p = online_softmax_step(m_i, l_i, s)\n",
            """    m_new = tl.maximum(m_i, tl.max(s, axis=1))
    alpha, p = tl.exp(m_i - m_new), tl.exp(s - m_new[:, None])
    m_i, l_i = m_new, alpha * l_i + tl.sum(p, axis=1)
""",
        ),
    ],
    "no rescale": [(STEP, "acc * alpha[:, None]", "acc")],
    "LSE without the maximum": [(KERNEL, "m_i + tl.log(l_safe)", "tl.log(l_safe)")],
    "batch of the keys forgotten": [
        (KERNEL, "stride_k, pid_bh // group,", "stride_k, pid_bh // group % (heads_q // group),")
    ],
    "V addressed with K's strides": [
        (KERNEL, "head_base(v_ptr, stride_v,", "head_base(v_ptr, stride_k,"),
        (KERNEL, "load_tile(v_head, stride_v,", "load_tile(v_head, stride_k,"),
    ],
    # For a hunt: where it is wrong is not said here.
    "suspect": [(KERNEL, "load_tile(v_head, stride_v, offs_n,", "load_tile(v_head, stride_v, offs_n - start_n,")],
}
NAMES = (*GROWTH, *_WRONG)
# In which a model speaks, and what is wrong can be heard or not.
HEARD = (
    "diagonal hidden", "loop bound without a mask", "mask the wrong way round", "loop ends a tile early", "no rescale",
    "LSE without the maximum",
)  # fmt: skip


def stage(name: str) -> Stage:
    """The kernel by one of NAMES: as far as it has grown with that feature, or in that wrong form."""
    if name in _WRONG:
        return Stage(forward, *_WRONG[name])
    later = GROWTH[GROWTH.index(name) + 1 :]
    return Stage(forward, *((KERNEL, *edit) for feature in later for edit in _FEATURES[feature]))


def verdict_far_apart(name: str) -> str:
    """Of the stage `name` on keys whose batch entries 0 and 2 lie 2^31 elements apart.

    They lie in a sparse file, in which only the pages that are touched exist.
    """
    if not runtime.INTERPRETED:
        return "not tried: kernels are compiled here, and the file is in a CPU's memory"
    q, k, v = make_qkv(3, 2, 20, 16)
    with tempfile.TemporaryDirectory() as folder, stage(name):
        options = dict(shared=True, size=2**32 + 2**20, dtype=torch.float16)
        file = torch.from_file(f"{folder}/sparse", **options)
        far = file.as_strided(k.shape, (2**30, 20 * 16, 16, 1), 2**31).copy_(k)
        return verify_results(forward.attention_forward, q, far, v).verdict


_PLACES = (
    "offs_d = tl.arange(0, HEAD_DIM)",
    "q = load_tile(q_head, stride_q, offs_m, offs_d, seq_q, HEAD_DIM)",
    "acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)",
    "k = load_tile(k_head, stride_k, offs_n, offs_d, seq_k, HEAD_DIM)",
    "v = load_tile(v_head, stride_v, offs_n, offs_d, seq_k, HEAD_DIM)",
    "store_tile(o_head, stride_o, offs_m, offs_d, seq_q, HEAD_DIM, acc / l_safe[:, None])",
)
_WIDE = {1, 3}


def try_columns(places: set[int] | None) -> None:
    """Print what the kernel does at head_dim 80 with BLOCK_D in these places; without any, the places."""
    if places is None:
        print(*(f"{n}  {place}" for n, place in enumerate(_PLACES, start=1)), sep="\n")
        return
    forms = [(place, place.replace("HEAD_DIM", "BLOCK_D")) for place in _PLACES]
    edits = [(KERNEL, form[n in _WIDE], form[n in places]) for n, form in enumerate(forms, start=1)]
    try:
        with Stage(forward, *edits):
            report = verify_results(_o_alone, *make_qkv(1, 1, 70, 80))
    except Exception as error:  # no tile is 80 wide
        print(f"the kernel does not run: {_innermost(error)}")
        print(*(f"place {n} makes a tile of 80 columns" for n in sorted(_WIDE - places)), sep="\n")
        return
    print(report.results[0])
    if not report.passed:
        print(*(f"place {n} must end at the true columns" for n in sorted(places - _WIDE)), sep="\n")
    if report.passed and places != _WIDE:
        print("right, but it loads columns behind the matrix: it must not rely on what lies there")


def _o_alone(*args, **options):
    return forward.attention_forward(*args, **options)[0]


def _innermost(error: BaseException) -> BaseException:
    while error.__cause__ or error.__context__:
        error = error.__cause__ or error.__context__
    return error


SEQ_Q, SEQ_K = 200, 100
TILE_Q, TILE_K = 64, 32  # not square, so that they cannot be mistaken for each other


def tried(kernel: Stage) -> tuple:
    """The harness's report on a causal call, and how many tiles of keys the kernel visits in it."""
    q, k, v = make_qkv(1, 1, SEQ_Q, 64, seq_k=SEQ_K)
    tiles = dict(BLOCK_M=TILE_Q, BLOCK_N=TILE_K, num_warps=4, num_stages=1)

    with kernel, mock.patch.object(runtime, "tile_sizes", return_value=tiles):
        report = verify_results(_o_alone, q, k, v, is_causal=True)  # LSE may still be missing
        if not runtime.INTERPRETED:
            return report, "not counted"
        with traffic.measure() as done:
            forward.attention_forward(q, k, v, is_causal=True)
    return report, done.products // 2  # S and PV of each


def try_mask(loop_ends: str, pair_visible: str) -> None:
    """Print what a causal mask of these two expressions does, in the kernel of the stage "head_dim"."""
    lines = [
        (KERNEL, BOUND[0], f"    end_n = {loop_ends}\n"),
        (KERNEL, MASK[0], f"        visible = visible & ({pair_visible})\n"),
    ]
    try:
        report, visited = tried(Stage(forward, *lines))
    except SyntaxError as error:
        print(f"this is not Python: {error.text or ''}".rstrip())
        return
    except Exception as error:  # such as a name that the kernel does not have
        print(f"the kernel does not run: {_innermost(error)}")
        return
    ends = (min(SEQ_K, start + TILE_Q) for start in range(0, SEQ_Q, TILE_Q))
    needed = sum(math.ceil(end / TILE_K) for end in ends)
    unbound = math.ceil(SEQ_Q / TILE_Q) * math.ceil(SEQ_K / TILE_K)
    print(f"{report.verdict}   tiles of keys visited: {visited}, needed: {needed}, without a bound: {unbound}")
    if report.passed and visited != needed and runtime.INTERPRETED:
        print("right, but it visits tiles in which nothing is visible")
    if report.hint:
        print(report.hint)
