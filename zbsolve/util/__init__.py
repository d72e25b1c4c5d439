"""Utilities for all other packages: errors, files, text, statistics, clocks, threads, kernels, the machine."""
