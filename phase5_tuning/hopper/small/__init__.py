"""Six small kernels, one idea each, on the way to the forward kernel beside this folder. Each file reads alone."""
