"""Attention in eight bits: forward only, for H100 and H200 in Gluon, for other GPUs in plain Triton."""
