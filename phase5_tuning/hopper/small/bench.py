"""How long the small kernels take, on an H100 or H200:

    python -m phase5_tuning.hopper.small.bench --name h100_small

The first three move bytes, so a row has their TB/s too; the others multiply, and have TFLOP/s. PyTorch's call for the
same is beside each.
"""

from collections.abc import Iterable

from common import runtime
from common.measure import records, timing
from phase5_tuning.hopper.small import k1_copy, k2_ring, k3_roles, k4_consumers, k5_stay, k6_pairs, lesson
from phase5_tuning.hopper.small.lesson import inputs, truth
from phase5_tuning.launch import configs

import torch
import torch.nn.functional as F

CASES = {  # heads, seq: many programs for the first three, 16384 tokens of 2048 columns for the others
    k1_copy: (32, 4096),
    k2_ring: (1056, 1024),
    k3_roles: (1056, 1024),
    k4_consumers: (64, 4096),
    k5_stay: (64, 4096),
    k6_pairs: (64, 4096),
}
KERNELS = {module: lesson.KERNELS[module] for module in CASES}
HEAD_DIM, ROUNDS = 128, 3


def in_pytorch(module, *given):
    """A function that does what the kernel does."""
    if module is k1_copy:
        return given[0].clone
    if module is k2_ring:
        return lambda: given[0].mean(dim=1, dtype=torch.float32)
    if module is k3_roles:
        q, k, v = given
        return lambda: F.scaled_dot_product_attention(q[:, None], k, v)
    return lambda: F.scaled_dot_product_attention(*given, is_causal=module is k5_stay)


def measured(module) -> list[dict]:
    """A row for the kernel and one for PyTorch. Raises AssertionError if the kernel is wrong at this size."""
    heads, seq = CASES[module]
    given = inputs(module, heads, seq, HEAD_DIM, device=runtime.DEVICE)
    options = {}
    if module in (k5_stay, k6_pairs):
        options["programs"] = configs.multiprocessors(torch.cuda.current_device())
    torch.testing.assert_close(module.run(*given, **options).float(), truth(module, *given), atol=2e-3, rtol=2e-3)
    name = module.__name__.rpartition(".")[2]
    providers = {name: lambda: module.run(*given, **options), f"{name}: PyTorch": in_pytorch(module, *given)}
    rows = timing.measure(providers, rounds=ROUNDS, heads=heads, seq=seq, head_dim=HEAD_DIM)
    if module in (k4_consumers, k5_stay, k6_pairs):
        flops = timing.attention_flops(1, heads, seq, seq, HEAD_DIM, is_causal=module is k5_stay)
        return timing.with_tflops(rows, flops)
    nbytes = sum(t.nbytes for t in given) + given[0].nbytes * (module is k1_copy)
    return [row | dict(bytes=nbytes) for row in rows]


def run() -> list[dict]:
    with torch.no_grad():
        return [row for module in KERNELS for row in measured(module)]


SETTINGS = list(CASES.values()), inputs, truth, measured


def recorded(providers: Iterable[str] = ()) -> tuple[list, tuple]:
    """(kernels, settings) of a record, whichever providers it has."""
    return [getattr(module, name) for module, name in KERNELS.items()], SETTINGS


if __name__ == "__main__":
    kernels, settings = recorded()
    raise SystemExit(records.main("phase5_tuning", kernels, run, settings=settings))
