"""What kernel tests share: shapes, a paged pool with scattered pages, and attention in plain torch."""

import torch

# The interpreter computes in numpy, which has no bfloat16.
DTYPES = [torch.float32, torch.bfloat16 if torch.cuda.is_available() else torch.float16]
SHAPES = [  # num_q_heads, num_kv_heads, head_dim, page_size, page_first
    (4, 2, 64, 16, False),
    (8, 1, 128, 1, False),
    (3, 3, 80, 4, True),
    (16, 1, 96, 16, True),
    (2, 1, 256, 128, False),
]


class Pool:
    """A paged pool with scattered pages and rows of the given lengths, plus the dense K and V they stand for."""

    def __init__(self, lengths, kv_heads, dim, page_size, page_first, dtype, device, seed=0):
        gen = torch.Generator().manual_seed(seed)
        pages = [-(-n // page_size) for n in lengths]
        total = sum(pages) + 3
        shape = (2, 3, total, page_size, kv_heads, dim)
        if page_first:
            self.data = torch.randn(*(shape[i] for i in (2, 0, 1, 3, 4, 5)), generator=gen).permute(1, 2, 0, 3, 4, 5)
        else:
            self.data = torch.randn(*shape, generator=gen)
        self.data = self.data.to(dtype).to(device)
        if page_first and device.type == "cuda":
            assert not self.data.is_contiguous()
        self.k, self.v = self.data[0, 1], self.data[1, 1]
        order = torch.randperm(total, generator=gen).tolist()
        self.table = torch.zeros(len(lengths) + 2, max(pages) + 1, dtype=torch.int32)
        self.rows = torch.randperm(len(lengths) + 2, generator=gen)[: len(lengths)].to(torch.int32)
        for row, count in zip(self.rows.tolist(), pages, strict=True):
            self.table[row, :count] = torch.tensor([order.pop() * page_size for _ in range(count)])
        self.table, self.rows = self.table.to(device), self.rows.to(device)
        self.page_size, self.lengths = page_size, lengths

    def dense(self, entry):
        n = self.lengths[entry]
        position = torch.arange(n, device=self.table.device)
        page = self.table[int(self.rows[entry])][position // self.page_size].long() // self.page_size
        return (cache[page, position % self.page_size].float() for cache in (self.k, self.v))


def reference(q, k, v, cached):
    """Causal attention in float32: q [t, hq, d] at positions cached.., k and v [n, hkv, d]."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    score = torch.einsum("thd,nhd->htn", q.float(), k) * q.shape[2] ** -0.5
    at = torch.arange(q.shape[0], device=q.device) + cached
    score.masked_fill_(torch.arange(k.shape[0], device=q.device)[None, None] > at[None, :, None], float("-inf"))
    return torch.einsum("htn,nhd->thd", score.softmax(-1), v)


def close(actual, expected, dtype):
    error = (actual.float() - expected).norm() / expected.norm()
    assert error < (1e-5 if dtype == torch.float32 else 1e-2), float(error)
