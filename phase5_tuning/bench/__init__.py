"""Measurements on a GPU, and what their records say."""
