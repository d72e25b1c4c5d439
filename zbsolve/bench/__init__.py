"""Benchmarks of the search: suites of problems, reports that keep every sample, one report against another."""
