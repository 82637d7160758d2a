"""Kernels make numbers: the Backend protocol and everything that implements it."""
