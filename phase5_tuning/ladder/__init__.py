"""One idea a kernel, in plain Triton: from phases 3 and 4 to what ships. And the pictures of the chapter on it."""
