"""Errors and speed of attention in e4m3: `python -m phase5_tuning.fp8.bench --name h100_fp8`.

    --part errors,speed     one or both
    --check                 verify one head at each shape before it is timed

Errors: root mean square over that of the truth, attention in fp64 of the inputs before they are quantized. By inputs,
scales, rotation and how P is made. Speed: the kernels alone, and with what a caller who has bf16 needs. Beside both is
FlashAttention-3 (package fa3-fwd), whose scales are of heads.
"""

import functools
import itertools

from common import arguments as command_line
from common import runtime, verify_results
from common.arguments import listed
from common.measure import records, timing
from common.verify.inputs import make_qkv
from phase5_tuning.attention import flash_attention
from phase5_tuning.fp8 import forward, quantize, reference
from phase5_tuning.fp8.attention import attention_forward_fp8
from phase5_tuning.hopper.forward import columns_of

import torch

CELLS = list(itertools.product((64, 128), (False, True), (1024, 4096, 16384)))  # head_dim, is_causal, seq
TOKENS, WIDTH, ROUNDS = 16384, 2048, 2
LENGTHS = {4096: 8, 16384: 2}  # keys: heads, for errors
ROWS = 1024  # queries of which errors are taken
PARTS = "errors", "speed"


# --- errors --------------------------------------------------------------------------------------------------------


def spread(x):
    """N(0, 1) + N(0, 100) where Bernoulli(0.001) is 1, as in FlashAttention-3's paper."""
    return x + 10 * torch.randn_like(x) * (torch.rand_like(x) < 0.001)


def one_column(x):
    x[..., 3] *= 30
    return x


def one_row(x):
    x[:, :, x.shape[2] // 3] *= 30
    return x


INPUTS = {
    "normal": lambda x: x,
    "spread outliers": spread,
    "one column": one_column,
    "one row": one_row,
    "one sign": torch.abs,  # what the sum of a product in e4m3 loses, it loses on one side
}


def attend(codes: quantize.Quantized, o, is_causal: bool, line: bool):
    """A function without arguments that attends on codes, and writes o."""
    lse = torch.empty(o.shape[:3], dtype=torch.float32, device=o.device)
    launch = forward.plan(codes, o, is_causal, o.shape[3] ** -0.5, line)

    def call():
        taken = torch.zeros(1, dtype=torch.int32, device=o.device)
        launch(*codes[:3], o, *codes[3:], lse, taken)
        return o

    return call


def fa3_alone(q8, k8, v8, scales, is_causal):
    """FlashAttention-3 on codes (batch, seq, heads, head_dim) and scales (batch, heads)."""
    import fa3_fwd_interface

    descale = dict(zip(("q_descale", "k_descale", "v_descale"), scales, strict=True))
    o = fa3_fwd_interface.flash_attn_func(q8, k8, v8, causal=is_causal, **descale)
    return o[0] if isinstance(o, tuple) else o


def cast(*tensors):
    """(codes, scales) with a scale for each head, of tensors (batch, seq, heads, head_dim)."""
    scales = [t.float().abs().amax((1, 3)) / quantize.LARGEST.value for t in tensors]
    return [(t / s[:, None, :, None]).to(quantize.E4M3) for t, s in zip(tensors, scales, strict=True)], scales


@functools.cache
def compiled_cast():
    return torch.compile(cast, dynamic=False)


def error(o, truth) -> float:
    o = o[:, :, : truth.shape[2]].double()
    return ((o - truth).square().mean() / truth.square().mean()).sqrt().item()


def errors(kind: str, head_dim: int, seq: int) -> list[dict]:
    generator = torch.Generator(device=runtime.DEVICE).manual_seed(0)
    torch.manual_seed(0)
    shape = 1, LENGTHS[seq], seq, head_dim
    made = (torch.randn(shape, generator=generator, device=runtime.DEVICE) for _ in range(3))
    q, k, v = (INPUTS[kind](x).bfloat16() for x in made)
    s = q[:, :, :ROWS].double() @ k.double().mT * head_dim**-0.5
    truth = s.softmax(3) @ v.double()
    del s
    rows, case = [], dict(part="errors", inputs=kind, head_dim=head_dim, seq=seq)
    with torch.no_grad():
        rows.append(case | dict(provider="bf16", rms=error(flash_attention(q, k, v), truth)))
        for by, rotate in itertools.product(reference.SHARED, (False, True)):
            codes = reference.quantize(q, k, v, columns_of(head_dim), rotate, 1, by)
            for provider in ("exact", "line"):
                o = attend(codes, torch.empty_like(q), False, provider == "line")()
                rows.append(case | dict(provider=provider, scales=by, rotate=rotate, rms=error(o, truth)))
        fa3 = case | dict(provider="fa3 fp8", scales="head", rotate=False)
        try:
            codes, scales = cast(*(t.transpose(1, 2).contiguous() for t in (q, k, v)))
            rows.append(fa3 | dict(rms=error(fa3_alone(*codes, scales, False).transpose(1, 2), truth)))
        except ImportError as missing:
            rows.append(fa3 | dict(note=str(missing)))
    for row in rows:
        print(*row.values(), sep="  ", flush=True)
    return rows


# --- speed ---------------------------------------------------------------------------------------------------------


def check(head_dim: int, is_causal: bool, seq: int) -> None:
    """Verify one head, the last of as many as are timed. Raises VerificationError."""
    batch, heads = TOKENS // seq, WIDTH // head_dim

    def among_others(q, k, v, *, is_causal, scale, enable_gqa):
        several = (t.expand(batch, heads, -1, -1) for t in (q, k, v))
        return tuple(t[-1:, -1:] for t in attention_forward_fp8(*several, is_causal))

    q, k, v = make_qkv(1, 1, seq, head_dim, dtype=torch.bfloat16, device=runtime.DEVICE)
    rounded = reference.restored(reference.quantize(q, k, v, columns_of(head_dim), True, 1), head_dim)
    verify_results(among_others, q, k, v, is_causal=is_causal, in_e4m3=rounded).check()


def speed(head_dim: int, is_causal: bool, seq: int) -> list[dict]:
    batch, heads = TOKENS // seq, WIDTH // head_dim
    case = dict(part="speed", head_dim=head_dim, is_causal=is_causal, seq=seq, batch=batch, heads=heads)
    like = dict(dtype=torch.bfloat16, device=runtime.DEVICE)
    q, k, v = (torch.randn(batch, heads, seq, head_dim, **like) for _ in range(3))
    columns = columns_of(head_dim)
    codes, launch = quantize.room(q, k, columns), quantize.plan(q, k, v, columns, True, 1)
    launch(q, k, v, *codes)
    of_fa3 = [torch.randn(batch, seq, heads, head_dim, **like) for _ in range(3)]
    codes_fa3, scales = cast(*of_fa3)
    providers = {
        "exact": attend(codes, torch.empty_like(q), is_causal, False),
        "line": attend(codes, torch.empty_like(q), is_causal, True),
        "quantize": lambda: launch(q, k, v, *codes),
        "exact, quantized": lambda: attention_forward_fp8(q, k, v, is_causal),
        "line, quantized": lambda: attention_forward_fp8(q, k, v, is_causal, line=True),
        "fa3 fp8": lambda: fa3_alone(*codes_fa3, scales, is_causal),
        "fa3 fp8, cast": lambda: fa3_alone(*(made := compiled_cast()(*of_fa3))[0], made[1], is_causal),
        "bf16": lambda: flash_attention(q, k, v, is_causal=is_causal),
    }
    with torch.no_grad():
        rows = timing.measure(providers, rounds=ROUNDS, **case)
    return timing.with_tflops(rows, timing.attention_flops(batch, heads, seq, seq, head_dim, is_causal=is_causal))


def run(args) -> list[dict]:
    rows = []
    if "errors" in args.part:
        for kind, head_dim, seq in itertools.product(INPUTS, (64, 128), LENGTHS):
            rows += errors(kind, head_dim, seq)
    for cell in CELLS if "speed" in args.part else ():
        if args.check:
            check(*cell)
        rows += speed(*cell)
        torch.cuda.empty_cache()
    return rows


KERNELS = quantize._quantize_kernel, forward._attn_fwd_fp8_kernel
SETTINGS = run, list(INPUTS), spread, one_column, one_row, forward.plan, quantize.plan, reference.quantize


def main(argv=None) -> int:
    part = dict(type=listed(choices=PARTS), default=",".join(PARTS), help="errors, speed or both")
    checks = "verify one head at each shape first"
    args = command_line.arguments(argv=argv, name=records.NAME, commit=records.COMMIT, part=part, check=checks)
    return records.main("phase5_tuning", KERNELS, lambda: run(args), args, ["fa3-fwd"], SETTINGS)


if __name__ == "__main__":
    raise SystemExit(main())
