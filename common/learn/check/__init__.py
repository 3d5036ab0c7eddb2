"""The check of an answer: the child process that judges it, and what checks require."""
