"""Phase 5: from correct to fast, measured. A folder is a subject, with its kernels and its pictures:

launch   how a call is launched: tiles, plans, the launch itself
ladder   one idea a kernel, in plain Triton
hopper   kernels for H100 and H200, in Gluon, and what runs and models them on a CPU
decode   few queries with many keys, split over keys
passes   which kernel takes a call, forward and backward
         (attention.py, beside the folders: the operator)
fp8      attention in eight bits, forward only
ring     attention over several GPUs
bench    speed beside peers, and other measurements
lesson   what the chapters' cells call

A folder imports from those above it only. cases is what `python -m phase5_tuning` verifies; export makes one file of
the operator.
"""

from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.fp8.attention import flash_attention_fp8
from phase5_tuning.passes.backward import attention_backward
from phase5_tuning.passes.forward import attention_forward

__all__ = ["FlashAttention", "attention_backward", "attention_forward", "flash_attention", "flash_attention_fp8"]
