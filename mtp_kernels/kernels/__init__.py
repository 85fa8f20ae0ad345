"""Triton kernels and their launchers, one module per op; imported when first called."""
