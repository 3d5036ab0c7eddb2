"""Attention over several GPUs: ranks pass keys and values around."""
