"""Few queries with many keys: generating a token, checking some that were guessed, a chunk of a long prompt."""
