"""Shapes that models call, beside what PyTorch runs for them."""
