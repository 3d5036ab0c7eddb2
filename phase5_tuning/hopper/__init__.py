"""Kernels for Hopper in Gluon, and what runs, times and orders them on a CPU."""
