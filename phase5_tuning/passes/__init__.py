"""The forward and the backward pass: which kernel takes a call, and with what arguments."""
