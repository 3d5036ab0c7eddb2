"""What several checks of phase 2's exercises need; each check is a module beside this one (see common.learn.check)."""

import ast
import inspect
import itertools
from collections.abc import Callable

from common import make_qkv, verify_results
from common.learn.check.require import reject, require, require_tensor_cores

import torch

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
NAN = float("nan")
STRIDES = "{name} is read with the strides of {other}: it has its own, stride_{name}"
AT_HAND = ("load_tile", "store_tile", "tile_pointers", "head_base", "_check", "_launch")


def with_other_strides(attention: Callable, sentence: str, **tensors) -> dict[str, torch.Tensor]:
    """{sentence: attention(**tensors)}, one of the tensors read with the strides of another one."""
    wrong = {}
    for name, other in itertools.permutations("qkv", 2):
        misread = tensors[name].as_strided(tensors[name].shape, tensors[other].stride())
        wrong[sentence.format(name=name, other=other)] = attention(**tensors | {name: misread})
    return wrong


def require_own_loop(answer):
    """Reject an answer that takes from phase 2's module what it is to write."""
    for node in ast.walk(ast.parse(inspect.getsource(answer))):
        used = []
        if isinstance(node, ast.ImportFrom) and node.module == "phase2_tiling.tiling":
            used = [alias.name for alias in node.names]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value).endswith("tiling"):
            used = [node.attr]
        for name in used:
            if name not in AT_HAND:
                why = "that is what you are to write. Use load_tile, online_softmax_step and tl.dot"
                reject(f"line {node.lineno} takes {name} from phase 2's module: {why}")


def require_products(answer, attention: Callable) -> None:
    """Reject products in TF32 or off the tensor cores. attention(q, k, v) runs the answer's kernel."""
    require_tensor_cores(answer, lambda: attention(*one_head(32, 64, 16, dtype=FP16)))


def attention_cases(*lengths):
    """(seq_q, seq_k, head_dim, dtype, options of `one_head`): dtypes, kinds of numbers, lengths and strides."""
    cases = [(100, 150, 64, dtype, {}) for dtype in (FP16, BF16, FP32)]
    cases += [(70, 150, 32, dtype, dict(kind=kind)) for dtype in (FP16, BF16, FP32) for kind in ("peaked", "low")]
    return cases + [(33, seq_k, 32, FP32, dict(transposed=True)) for seq_k in lengths]


def one_head(seq_q, seq_k, head_dim, *, transposed=False, **options):
    """q, k, v of one head, each with strides of its own; NaN lies around them. transposed: the stride of rows of q and
    k is 1.
    """
    q, k, v = (t[0, 0] for t in make_qkv(1, 1, seq_q, head_dim, seq_k=seq_k, **options))
    if transposed:
        return surrounded(q.T, 8).T, surrounded(k.T).T, surrounded(v)
    return surrounded(q, 8), surrounded(k), surrounded(v, 12)


def surrounded(x, beside=4):
    """x inside larger memory full of NaN: a stray access of less than a tile does no harm and leaves a trace. beside:
    how many NaN lie before and after each row.
    """
    margins = [64, beside][: x.dim()]
    memory = x.new_full([n + 2 * margin for n, margin in zip(x.shape, margins, strict=True)], NAN)
    for axis, margin in enumerate(margins):
        memory = memory.narrow(axis, margin, x.shape[axis])
    return memory.copy_(x)


def with_own_strides(*matrices):
    """A copy of each matrix; the distance of rows is another one for each, and what lies between them is finite."""
    wide = matrices[0].shape[1] + 8 * len(matrices)
    copies = []
    for n, x in enumerate(matrices):
        rows, cols = x.shape
        memory = torch.linspace(-2, 2, (rows + 64) * wide, dtype=x.dtype, device=x.device)
        copies.append(memory.as_strided((rows, cols), (cols + 8 * (n + 1), 1)).copy_(x))
    return copies


def nan_around(x):
    """Whether the memory around a tensor that `surrounded` made (and that holds no NaN itself) is untouched."""
    return int((~x._base.isnan()).sum()) == x.numel()


def require_any_scale(attention: Callable) -> None:
    """Reject attention(q, k, v, scale) that masks keys before it scales."""
    q, k, v = one_head(20, 70, 16, dtype=FP32)
    for scale in (0.0, -0.1):
        o = attention(q, k, v, scale)
        right = torch.softmax(scale * q.double() @ k.double().T, dim=1) @ v.double()
        early = "it is NaN: is s masked before it is scaled? -inf * 0 is NaN, and a negative scale makes it +inf"
        nan = bool(isinstance(o, torch.Tensor) and o.isnan().any())
        require(f"o, scale {scale}, 70 keys", o, right, signs={early: nan})


def require_fp32_state(attention: Callable) -> None:
    """Reject attention(q, k, v) whose acc is rounded to fp16 in each turn: it stays at 32768, whatever a tile adds."""
    q, k, v = one_head(3, 2112, 16, dtype=FP16)
    q.zero_(), v[:64].fill_(512), v[64:].fill_(1 / 16)
    right = v.double().mean(dim=0).expand(3, 16)
    rounded = (
        "acc is rounded to fp16 in every turn, and forgets what a tile adds to a large sum: keep m, l and acc in fp32"
    )
    mistakes = {rounded: torch.full_like(right, 32768 / 2112)}
    what = "o, fp16, all weights the same, the first 64 values 512 and 2048 more 1/16"
    require(what, attention(q, k, v), right, mistakes=mistakes, rtol=1e-3)


def state_of(q, k, v):
    """o, m, l of these keys; fp64."""
    s = q.shape[1] ** -0.5 * q.double() @ k.double().T
    m = s.amax(dim=1)
    p = torch.exp(s - m[:, None])
    return p @ v.double() / p.sum(dim=1, keepdim=True), m, p.sum(dim=1)


def verify(fn, q, k, v, scale=None):
    options = dict(scale=scale, compare_sdpa=False)
    verify_results(lambda q, k, v, *, scale, **_: fn(q, k, v, scale), q, k, v, **options).check()
