"""What the chapter's cells call: the learner's pieces, edited kernels, and experiments with their tables."""

import functools
import math
import warnings
from collections.abc import Callable
from types import SimpleNamespace

from common import make_qkv, make_tensor, runtime, verify_results
from common.edited import Stage
from common.learn import exercises
from common.learn.check import answer
from common.learn.progress import Progress
from common.measure import timing
from common.speak.text import in_words
from common.verify import harness
from common.verify.expected import expected
from common.verify.mistakes.table import MISTAKES
from common.verify.reference import naive_attention_backward
from phase3_forward.forward import attention_forward
from phase4_backward import backward, train
from phase4_backward.backward import FlashAttention, attention_backward, flash_attention

import torch
import torch.nn.functional as F

# --- 4. The kernels ----------------------------------------------------------------------------------------


DKDV, LSE = "_attn_bwd_dkdv_kernel", "lse_ptr + row + offs_m"
EDITS = {
    "walk from query 0": [(DKDV, "start = pid_n * BLOCK_N // BLOCK_M * BLOCK_M", "start = 0")],
    "missing queries not masked": [(DKDV, "visible = (offs_m < seq_q)[:, None]", "visible = (offs_m >= 0)[:, None]")],
    "their LSE loaded as -1000": [
        (DKDV, f"{LSE}, mask=offs_m < seq_q, other=0.0", f"{LSE}, mask=offs_m < seq_q, other=-1000.0")
    ],
    "missing keys not masked": [
        ("_attn_bwd_dq_kernel", "visible = (offs_n < seq_k)[None, :]", "visible = (offs_n >= 0)[None, :]")
    ],
    "delta = 0": [("_delta_kernel", "o.to(tl.float32) * do", "0.0 * do")],
    "dS in fp16": [("_attn_bwd_dq_kernel", "ds.to(k.dtype)", "ds.to(tl.float16).to(k.dtype)")],
    "dV = dS^T dO": [(DKDV, "tl.trans(p.to(do.dtype))", "tl.trans(ds.to(do.dtype))")],
    "dV / 100": [(DKDV, "HEAD_DIM, dv)", "HEAD_DIM, dv / 100)")],
    "dQ = dK = 0": [
        ("_attn_bwd_dq_kernel", "HEAD_DIM, dq * scale", "HEAD_DIM, dq * 0.0"),
        (DKDV, "HEAD_DIM, dk * scale", "HEAD_DIM, dk * 0.0"),
    ],
}  # fmt: skip


def attention(q, k, v, *, is_causal, scale, enable_gqa):
    """o and lse, as verify_results takes them."""
    return FlashAttention.apply(q, k, v, is_causal, scale)


def changed_kernels() -> tuple[int, list[str]]:
    """Four changes of the dK/dV kernel, each tried on a causal call of 70 queries and keys, 4 query heads on 2 key
    heads: how many spoil a gradient, and what verify_results says of each change's gradients.
    """
    mask, lse, walk = "missing queries not masked", "their LSE loaded as -1000", "walk from query 0"
    q, k, v = make_qkv(1, 4, 70, 32, heads_kv=2)
    do = make_tensor(q.shape, dtype=q.dtype, generator=torch.Generator().manual_seed(1))
    spoiled, lines = 0, []
    for letter, names in dict(A=(mask,), B=(lse,), C=(mask, lse), D=(walk,)).items():
        with Stage(backward, *(edit for name in names for edit in EDITS[name])):
            report = verify_results(attention, q, k, v, do=do, is_causal=True, enable_gqa=True, compare_sdpa=False)
        spoiled += not report.passed
        lines.append(f"{letter}  {report.verdict[report.verdict.index('dq') :]}")
    return spoiled, lines


def unmasked_keys() -> tuple[int, list[str]]:
    """dq where the dQ walk does not mask the keys past the end: at how many LSEs of the queries it is NaN in fp16, and
    a table of the LSEs.
    """
    lses, spoiled = (-8, -16, -64, -96), []
    lines = [f"{'LSE':<13}" + "".join(f"{lse:>8}" for lse in lses)]
    for dtype in (torch.float16, torch.float32):
        found = ["finite" if _unmasked_dq(dtype, lse).isfinite().all() else "NaN" for lse in lses]
        spoiled.append(found.count("NaN"))
        lines.append(f"dq in {str(dtype).removeprefix('torch.')}" + "".join(f"{word:>8}" for word in found))
    return spoiled[0], lines


def _unmasked_dq(dtype, lse):
    """dq of 70 queries, each with this LSE: all logits are equal."""
    _, _, v = make_qkv(1, 1, 70, 16, dtype=dtype)
    do = make_tensor(v.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    logit = lse - math.log(70)  # of 16 products, times a scale of 1/4
    q = torch.full_like(v, math.sqrt(-logit / 4))
    with Stage(backward, *EDITS["missing keys not masked"]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, where numbers overflow
        o, of_rows = attention_forward(q, -q, v)
        return attention_backward(q, -q, v, o, of_rows, do, needs_kv=False)[0]


PIECES = ("whole_forward", "delta", "one_tile", "dq_loop", "dkdv_loop")


def pieces() -> SimpleNamespace:
    """The modules of the exercises that make both passes: the learner's where solved, else the course's solution."""
    own, modules, progress = [], {}, Progress.load()
    for name in PIECES:
        exercise = exercises.find(name)
        solved = progress.solved(exercise)
        own += [name] if solved else []
        modules[name] = answer.load(exercise.path if solved else exercise.solution, name)
    for loop in (modules["dq_loop"], modules["dkdv_loop"]):
        loop.recompute_tile = modules["one_tile"].recompute_tile
    print("yours:", ", ".join(own) or "none yet")
    if course := [name for name in PIECES if name not in own]:
        print("the course's:", ", ".join(course))
    return SimpleNamespace(**modules)


def verdicts(fn: Callable) -> None:
    """Print what verify_results says of attention fn(q, k, v, is_causal=, scale=, enable_gqa=) and its gradients."""
    reports = {}
    for dtype in (torch.float16, torch.float32):
        for is_causal, sizes in ((False, dict(seq_k=100)), (True, dict(layout="bshd"))):
            q, k, v = make_qkv(1, 2, 70, 40, dtype=dtype, **sizes)
            do = make_tensor(q.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
            case = f"{str(dtype).removeprefix('torch.')}, {'causal' if is_causal else 'full'}"
            reports[case] = verify_results(fn, q, k, v, do=do, is_causal=is_causal, compare_sdpa=False)
    print(f"{sum(report.passed for report in reports.values())} of {len(reports)} pass: {'; '.join(reports)}")
    for case, report in reports.items():
        if not report.passed:
            print(f"{case:<16}{report.verdict}")


def kept(fn: Callable) -> int:
    """KiB that autograd keeps of fn(q, k, v) for the backward pass: one head of 512 tokens, head_dim 64, fp32."""
    inputs = [t.requires_grad_() for t in make_qkv(1, 1, 512, 64, dtype=torch.float32)]
    sizes = {}

    def note(t):
        sizes[t.data_ptr()] = t.nbytes  # k and its transpose are one tensor
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        o = fn(*inputs)
    del o  # until here its graph holds what was kept, so that no address comes twice
    return sum(sizes.values()) // 1024


# --- 5. Tests ------------------------------------------------------------------------------------------------------


def quotient_error(h: float, *edits: str) -> float:
    """How far the length of the kernels' dQ, with these EDITS, is from the difference quotient of a step h along dQ, as
    a share of the quotient: 64 tokens, head_dim 32, fp32.
    """
    q, k, v = make_qkv(1, 1, 64, 32, dtype=torch.float32)
    do = make_tensor(q.shape, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    with Stage(backward, *(edit for name in edits for edit in EDITS[name])):
        (dq,) = torch.autograd.grad(flash_attention(q.requires_grad_(), k, v), q, do)
    step = h * dq / dq.norm()
    losses = [(flash_attention(q.detach() + s, k, v).double() * do).sum() for s in (step, -step)]
    return abs(dq.norm() * 2 * h / (losses[0] - losses[1]) - 1).item()


def gradcheck(fn: Callable) -> bool:
    """What torch.autograd.gradcheck says of fn(q, k, v) on eight queries and 34 keys in fp64."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, 1, s, 2, generator=generator, dtype=torch.float64) for s in (8, 34, 34)]
    return torch.autograd.gradcheck(fn, [t.requires_grad_() for t in inputs], raise_exception=False)


def mistakes() -> dict[str, tuple[dict[str, float], bool]]:
    """19 mistakes of a backward pass, in an emulation of the kernels in PyTorch: the z of verify_results by gradient,
    and whether a fixed tolerance of 0.01 lets all three pass. Inputs are normal and fp16 where the name says no other.
    """
    found = {}
    for mutant in MISTAKES.values():
        if not mutant.case.grad or mutant.benign or mutant.foreign:
            continue
        q, k, v, do = mutant.case.inputs()
        got = harness.run_attention(mutant.attention, q, k, v, do, mutant.case.options)
        wanted = expected(q, k, v, do, mutant.case.is_causal, q.shape[-1] ** -0.5)
        apart = {name: (got[name].double() - wanted[name].truth).abs() for name in ("dq", "dk", "dv")}
        z = {name: (of / wanted[name].sigma).max().item() for name, of in apart.items()}
        inputs = ", fp32 inputs" if q.dtype == torch.float32 else ""
        inputs += ", positive inputs" if mutant.case.kind == "positive" else ""
        found[mutant.what + inputs] = z, all(of.max() <= 1e-2 for of in apart.values())
    return found


def scaled_gradients() -> None:
    """Print the errors of dq, in fp16 and bf16, whose dO is multiplied by powers of two."""
    print("relative error of dq    fp16      bf16")
    for power in (-20, -16, -12, 0, 12, 16):
        errors = [_error_of_dq(dtype, power) for dtype in (torch.float16, torch.bfloat16)]
        print(f"dO times 2^{power:<9}" + "".join(f"{x:>10.1e}" for x in errors))


def _error_of_dq(dtype, power):
    q, k, v = make_qkv(1, 1, 64, 32, seq_k=128, dtype=dtype)
    do = make_tensor(q.shape, dtype=dtype, generator=torch.Generator().manual_seed(1))
    truth = naive_attention_backward(*(t.double() for t in (q, k, v, do)))[0]
    o, lse = attention_forward(q, k, v)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NumPy's, where infinities meet
        dq = attention_backward(q, k, v, o, lse, do * 2.0**power, needs_kv=False)[0]
    return ((dq.double() / 2.0**power - truth).norm() / truth.norm()).item()


# --- 6. The price --------------------------------------------------------------------------------------------------


def time_yours(fn: Callable) -> None:
    """Print the ms of the backward pass of fn(q, k, v), the course's and SDPA's: 4096 tokens, head_dim 64, fp16."""
    if runtime.INTERPRETED:
        print("no GPU here, and the interpreter's time says nothing about one")
        return
    leaves = [t.requires_grad_() for t in make_qkv(4, 32, 4096, 64)]
    do = torch.randn_like(leaves[0])
    for name, attention in {
        "yours": fn,
        "the course's": flash_attention,
        "SDPA": F.scaled_dot_product_attention,
    }.items():
        o = attention(*leaves)
        ms = timing.time_ms(functools.partial(torch.autograd.grad, o, leaves, do, retain_graph=True)).median
        print(f"{name:<13}{ms:7.2f} ms")


# --- 4.7 and 7. Training -------------------------------------------------------------------------------------------


def trained_wrongly(record: dict) -> tuple[int, str]:
    """With how many mistakes of logic training fails, every run above a loss of 1 or not finite, and their names."""
    runs = [row for row in record["rows"] if row["attention"] in train.LOGIC and not row["clip"]]
    survived = {row["attention"] for row in runs if len(row["losses"]) == row["steps"] and _end(row) < 1}
    failed = [name for name in train.LOGIC if name not in survived]
    return len(failed), "\n".join(MISTAKES[name].what for name in failed)


def _end(row):
    return sum(row["losses"][-20:]) / 20


def last_losses(record: dict) -> None:
    """Print the mean loss of the last 100 steps of each long run."""
    for dtype in ("float32", "bfloat16"):
        runs = [row for row in record["rows"] if row["dtype"] == dtype]
        ends = (f"{row['attention']} {sum(row['losses'][-100:]) / 100:.4f}" for row in runs)
        print(f"last 100 steps, {dtype:<9}", ", ".join(ends))


NUMBERS = (417, 2058)


def speak(fn: Callable) -> None:
    """Print what the model that speaks writes, as its last layer learns with attention fn(q, k, v, is_causal=)."""
    for step, lines in zip((0, 4, 8, 12), train.relearn(fn, NUMBERS), strict=True):
        print(f"step {step:<3}", " | ".join(lines))


def speak_wrongly(*edits: str) -> tuple[int, list[str]]:
    """With how many of these EDITS both lines are right after twelve steps, and what is written with each."""
    right, said = 0, []
    for edit in edits:
        with Stage(backward, *EDITS[edit]):
            lines = train.relearn(flash_attention, NUMBERS)[-1]
        right += lines == [f"{number} {in_words(number)}" for number in NUMBERS]
        said.append(f"{edit:<22} " + " | ".join(lines))
    return right, said


def directions(*edits: str) -> list[str]:
    """A table, for these EDITS, of how the first gradient of the weights that make q, k and v lies to the right one."""
    right = train.first_gradients(flash_attention, NUMBERS)
    table = [f"{'cosine with the right gradient':<33}q     k     v"]
    for edit in edits:
        with Stage(backward, *EDITS[edit]):
            wrong = train.first_gradients(flash_attention, NUMBERS)
        pairs = zip(wrong, right, strict=True)
        cosines = [F.cosine_similarity(a.flatten(), b.flatten(), dim=0).item() for a, b in pairs]
        table.append(f"{edit:<30}" + "".join(f"{x:6.2f}" for x in cosines))
    return table
