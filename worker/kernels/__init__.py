"""Triton kernels of the step path. Each has a torch reference in its test; all run on the Triton interpreter too."""
