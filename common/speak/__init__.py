"""A small GPT that writes numbers in words, trained: a model to run attention in."""
