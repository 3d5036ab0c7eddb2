"""Checks attention with a bias on every key: known mistakes, lengths and dtypes, keys that are hidden by -inf, the
bytes that are moved, and what two compilers make of it.
"""

import dataclasses
import inspect

from common import runtime
from common.learn.check.require import counted, guarded, reject, reject_refused, require, require_none, tiles_of
from common.measure import offline
from phase2_tiling import checks
from phase2_tiling.checks import FP16, FP32, NAN, one_head, with_other_strides, with_own_strides
from phase2_tiling.checks.inner_loop import BY_NUMBER, loop

import torch
import triton

INF, SCALE = float("inf"), 0.3


def check(answer):
    checks.require_own_loop(answer)
    fn = guarded(answer.attention_with_bias)
    for seq_q, seq_k in ((50, 150), (150, 50)):
        _check_known_mistakes(fn, seq_q, seq_k)
    _check_large_biases(fn)
    _check_plain_attention(fn)
    _check_hidden_keys(fn)
    checks.require_fp32_state(lambda q, k, v: fn(q, k, v, torch.zeros(len(k), device=q.device)))
    _check_traffic(fn)
    checks.require_products(answer, lambda q, k, v: fn(q, k, v, torch.zeros(len(k), device=q.device)))
    compiled = _check_compiled(answer)
    return f"known mistakes, dtypes, ragged lengths, hidden keys, bytes; compiled for {compiled}"


def _attention(q, k, v, bias, scale=SCALE):
    """o in fp64."""
    s = scale * q.double() @ k.double().T + bias.double()
    return torch.softmax(s, dim=1) @ v.double()


def _bias(n, like):
    """n numbers, three elements apart; others lie between and behind them."""
    step = 3
    memory = torch.linspace(-4, 4, step * (n + 128), device=like.device)
    memory = memory[torch.randperm(len(memory), generator=torch.Generator().manual_seed(n))]
    return memory[: step * n : step]


def _check_known_mistakes(fn, seq_q, seq_k):
    """head_dim 16: no two sizes and no two strides are the same."""
    tensors = with_own_strides(*(t.clone() for t in one_head(seq_q, seq_k, 16, dtype=FP32)))
    bias = _bias(seq_k, tensors[0])
    with tiles_of(32, 64):
        o = fn(*tensors, bias, SCALE)
    mistakes = _wrong_biases(*tensors, bias)
    named = dict(zip("qkv", tensors, strict=True), bias=bias)
    mistakes |= with_other_strides(_attention, "{name} is read with the strides of {other}: it has its own", **named)
    right = _attention(*tensors, bias)
    if isinstance(o, torch.Tensor) and o.shape == right.shape:
        ask = "has the grid a program for each tile of queries, and does each begin at its own?"
        for rows in (32, 64):
            some = torch.cat([right[:rows], o[rows:].double()])
            mistakes[f"the first {rows} rows are right, the others are not: {ask}"] = some
    require(f"o, {seq_q} queries, {seq_k} keys, head_dim 16", o, right, mistakes=mistakes)


def _check_large_biases(fn):
    """Biases that 16 bits cannot hold, and biases as low as fp32 goes: no number is below all of them."""
    q, k, v = one_head(50, 150, 16, dtype=FP16)
    bias = 1000 + _bias(150, q)
    rounded, right = (_attention(q, k, v, b) for b in (bias.half(), bias))
    mistakes = {"the bias is rounded to 16 bits: it comes in fp32, and is added to s in fp32": rounded}
    require("o, biases near 1000, q in fp16", fn(q, k, v, bias, SCALE), right, mistakes=mistakes, rtol=0.0, atol=5e-3)
    q, k, v = one_head(50, 150, 16, dtype=FP32)
    low = torch.full((150,), torch.finfo(FP32).min, device=q.device)
    o, right = fn(0 * q, k, v, low, SCALE), _attention(0 * q, k, v, low)
    smaller = "keys past the end count: a finite number stands for -inf in them, and these biases are no larger"
    shrunk = bool(isinstance(o, torch.Tensor) and o.abs().sum() < 0.99 * right.abs().sum())
    require("o, all biases at fp32's lowest number", o, right, signs={smaller: shrunk})


def _wrong_biases(q, k, v, bias):
    """Sentence: the o of that mistake."""
    key = torch.arange(len(bias), device=q.device)
    packed = bias.as_strided(bias.shape, (1,))
    wrong = {
        "the bias has no effect: it belongs to keys, the columns of s, bias[None, :]. What is added to a whole row "
        "cancels in the softmax": _attention(q, k, v, 0 * bias),
        "the bias is multiplied by scale: add it after s is scaled": _attention(q, k, v, SCALE * bias),
        "the bias is subtracted": _attention(q, k, v, -bias),
        "the bias is read as if its numbers lay side by side: it has a stride": _attention(q, k, v, packed),
        "scale is not used, or is a default of your own": _attention(q, k, v, bias, 1.0),
        "1 / sqrt(head_dim) is used although scale is given": _attention(q, k, v, bias, 0.25),
    }
    for block in (16, 32, 64, 128):
        sentence = f"every tile gets the bias of the first {block} keys: do its offsets contain start_n?"
        wrong[sentence] = _attention(q, k, v, bias[key % block])
        missing = -len(bias) % block
        padded = [torch.nn.functional.pad(t, (0, 0, 0, missing)) for t in (k, v)]
        sentence = f"{missing} keys past the end count as logit 0: which bias has a missing key?"
        wrong[sentence] = _attention(q, *padded, torch.nn.functional.pad(bias, (0, missing)))
        for keys, also in ((k, ""), (padded[0], f", and {missing} keys past the end count as logit 0")):
            weights = torch.softmax(SCALE * q.double() @ keys.double().T, 1)[:, : len(bias)]
            late = f"the bias reaches the weights of v, but not m and l: add it to s before the step{also}"
            wrong[late] = (weights * bias.double().exp()) @ v.double()
        behind = bias.as_strided((len(bias) + missing,), bias.stride())
        sentence = "the bias is loaded past its end: its load needs a mask, and other=-inf hides a missing key"
        wrong[f"{sentence} ({missing} keys)"] = _attention(q, *padded, behind)
        sentence = f"the bias has no effect, and {missing} keys past the end count as logit 0"
        wrong[sentence] = _attention(q, *padded, torch.zeros(len(bias) + missing, device=q.device))
        tile = dict(scale=SCALE, bias=bias, step=block, width=block)
        for sentence, update in _WRONG_UPDATES.items():
            wrong[f"{sentence} (tiles of {block} keys)"] = loop(q, k, v, update=update, **tile)
        wrong[f"{BY_NUMBER} ({block} keys)"] = loop(q, k, v, first=lambda start, block=block: start // block, **tile)
    return wrong


_WRONG_UPDATES = {
    "the accumulator is not rescaled by alpha (section 1)": lambda acc, alpha, pv, l: acc + pv,
    "the new tile is rescaled too": lambda acc, alpha, pv, l: alpha * (acc + pv),
    "o holds the last tile of keys alone": lambda acc, alpha, pv, l: pv,
}


def _check_plain_attention(fn):
    """With a bias of 0 it is attention, so that verify_results can judge it."""
    for seq_q, seq_k, head_dim, dtype, options in checks.attention_cases(0, 1, 33, 64):
        if dtype in (FP16, FP32):
            q, k, v = one_head(seq_q, seq_k, head_dim, dtype=dtype, **options)
            bias = torch.zeros(seq_k, device=q.device)
            checks.verify(lambda q, k, v, scale, bias=bias: fn(q, k, v, bias, scale), q, k, v)
    q, k, v = one_head(0, 5, 16)
    if fn(q, k, v, torch.zeros(5, device=q.device)).shape != (0, 16):
        reject("o has a wrong shape for seq_q = 0: nothing is to be launched then")


def _check_hidden_keys(fn):
    """A bias of -inf hides the first 100 of 150 keys, then all of them."""
    q, k, v = one_head(40, 150, 32, dtype=FP32)
    for hidden in (100, 150):
        bias = _bias(150, q)
        bias[:hidden] = -INF
        right = _attention(q, k, v, bias).nan_to_num()
        o = fn(q, k, v, bias, SCALE)
        nan = "it is NaN: a row that has seen only -inf has no maximum to subtract, and in the end l = 0"
        known = dict(mistakes={nan: right * NAN}, signs={nan: bool(o.isnan().any())})
        require(f"o, the first {hidden} of 150 keys have the bias -inf", o, right, **known)


def _check_traffic(fn):
    q, k, v = one_head(300, 200, 32, dtype=FP16)
    bias = _bias(200, q)
    with counted(q=q, k=k, v=v, bias=bias) as moved:
        o = fn(q, k, v, bias)
    if moved:
        loaded, programs = moved.loaded_from, moved.loaded_from["k"] / k.nbytes
        signs = {
            f"{moved.stored} bytes are stored, and o has {o.nbytes}: does S or P pass through memory?": (
                moved.stored != o.nbytes
            ),
            "no byte of q is loaded: the kernel reads a copy. Pass q itself, with its strides": not loaded["q"],
            f"{loaded['q']} bytes of q are loaded, and it has {q.nbytes}: each query once, by its program": (
                loaded["q"] != q.nbytes
            ),
            f"k is loaded {programs:g} times at seq_q = 300: once by each program, and a program owns a tile of "
            "16 to 256 queries": programs != int(programs) or not 2 <= programs <= triton.cdiv(300, 16),
        }
        for name, t in (("v", v), ("bias", bias)):
            copied = "" if loaded[name] else ". Is a copy of it read? The kernel is to take its stride"
            need = f"{int(programs)} programs need {t.nbytes} each{copied}"
            signs[f"{loaded[name]} bytes of {name} are loaded: {need}"] = loaded[name] != programs * t.nbytes
        require_none(signs)
        with counted(k=k) as moved:
            fn(q[:256], k, v, bias)
        programs = int(moved.loaded_from["k"] / k.nbytes)
        if programs & (programs - 1):  # a tile holds a power of two of queries
            reject(f"{programs} programs walk over k at seq_q = 256: one of them has no queries")


def _require_one_launch(fn):
    """One kernel, which is the same for every length."""
    launches = []
    for seq in (512, 8192):
        q = torch.empty(seq, 64, dtype=FP16, device=runtime.DEVICE)
        bias = torch.empty(seq, device=runtime.DEVICE)
        launches.append(offline.record_launches(lambda q=q, bias=bias: fn(q, q, q, bias)))
    signs = {
        f"{len(launches[0])} kernels are launched: it is to be one": len(launches[0]) != 1,
        "the kernel is compiled anew for another length: seq_q or seq_k is a tl.constexpr, or a tile's size "
        "depends on one of them and meets a wall (section 4.1)": launches[0] != launches[1],
    }
    require_none(signs)
    return launches[0][0]


def _check_compiled(answer):
    """Compile the kernel for two GPUs; returns their names."""
    launch = _require_one_launch(answer.attention_with_bias)
    launch = dataclasses.replace(launch, source=inspect.getsource(answer))
    targets = ["sm_80", "sm_90"]
    for c in offline.compile_launches([launch], targets):
        if c.error:
            reject_refused(f"the launch for q, k, v (512, 64), {FP16}, on {c.target}", c.error)
        if not c.fits:
            limit = offline.SHARED_LIMIT[c.target] // 1024
            reject(f"it asks for {c.shared // 1024} KiB of shared memory; {c.target} has {limit}: take smaller tiles")
        if not any(c.instructions[name] for name in ("mma.sync", "wgmma")):
            reject(f"compiled for {c.target}, no product of fp16 tiles runs on the tensor cores: is it tl.dot?")
    return " and ".join(targets)
