"""Hopper kernels for a head_dim above 128."""
