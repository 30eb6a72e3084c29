"""`Gemm`: x @ weight.T + bias, with the weight repacked once for the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# oneDNN picks its blocked weight layout for about this many rows. Layouts made for 16 serve 1 to thousands of rows.
PACK_ROWS = 16


class Gemm:
    """A linear map with fixed weights.

    On the CPU, `pack` hands the weight to oneDNN in blocked form: for one to 16 rows that is 2-3 times as fast as
    `F.linear`, which goes through MKL with a plain weight. On CUDA one row, and a few with small weights, take our
    matrix-vector kernel. Everything else is `F.linear`.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias
        self.packed: torch.Tensor | None = None

    def pack(self) -> bool:
        """Repack the weight if that helps here; says whether it did, and the plain weight is then not needed."""
        if self.weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        try:
            self.packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, PACK_ROWS)
        except (AttributeError, RuntimeError):  # an operator or a data type this build or processor does not have
            return False
        return True

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """[rows, in] -> [rows, out], written into `out` if given (CUDA only)."""
        if x.is_cuda:
            return self._cuda(x, out)
        if self.packed is None:
            return F.linear(x, self.weight, self.bias)
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    def _cuda(self, x: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        from worker.kernels.gemv import gemv, suits  # triton comes with torch for CUDA only

        if suits(x.shape[0], self.weight):
            return gemv(x, self.weight, self.bias, out)
        if out is None:
            return F.linear(x, self.weight, self.bias)
        if self.bias is None:
            return torch.mm(x, self.weight.t(), out=out)
        return torch.addmm(self.bias, x, self.weight.t(), out=out)
