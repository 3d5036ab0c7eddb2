"""Phase 5: from correct to fast, measured. What its modules are for:

The operator: attention (SDPA's signature, autograd), forward and backward (its passes in plain Triton), hopper_forward
    and hopper_backward (in Gluon, for H100 and H200), hopper_parts and hopper_tma (instructions for which Gluon has no
    public word), configs (tiles), launch and direct (a call's plan, and its launch), export (one file).
The ladder: ladder (which kernels a rung runs), forward_ladder, dq_ladder and dkdv_ladder (one idea a kernel).
Several GPUs: context_parallel, ranks (who holds which rows), heartbeat (names a rank that is gone).
Models, on a CPU: gluon_interpreter (runs the Hopper kernels), hopper_model (time in a multiprocessor), hopper_order
    (the order of dQ), ring_model (ranks and their messages), counts (tiles, programs, clocks).
Measurement: bench, hopper_bench, context_bench (speed beside peers), hopper_beside, host, power, counters (one
    question each), compile_all and listing (machine code), hopper_launches (the chapter's kernels, compiled).
Records read: hopper_records (tables), figures, hopper_figures, hopper_sketches, context_figures, speeds (pictures).
Tests: cases, which `python -m phase5_tuning` runs.
"""

from phase5_tuning.attention import FlashAttention, flash_attention
from phase5_tuning.backward import attention_backward
from phase5_tuning.forward import attention_forward

__all__ = ["FlashAttention", "attention_backward", "attention_forward", "flash_attention"]
