"""Benchmarks behind `raydix bench`."""
