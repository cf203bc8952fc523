"""PyTorch's attention on one thread, for compare.py: SDPA and FlexAttention.

MISSING says why there are no rows, or is None. Each row computes dense causal attention of a shape
and has been compared with focus::reference on a small problem.
"""
import dataclasses
import typing

try:
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    MISSING = None
except ImportError as problem:
    MISSING = f"no torch ({problem})"


@dataclasses.dataclass(frozen=True)
class Shape:
    type: str
    tokens: int
    heads: int
    head_dim: int


@dataclasses.dataclass(frozen=True)
class Row:
    name: str
    run: typing.Callable
    error: float


CHECK_HEADS, CHECK_TOKENS = 2, 600  # of the small problem, as peers.cpp writes it


def sdpa():
    def attend(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    return attend


def flex():
    """Compiled for each sequence length, with the block mask made beforehand."""
    compiled = torch.compile(flex_attention)
    masks = {}

    def attend(q, k, v):
        tokens = q.shape[-2]
        if tokens not in masks:
            masks[tokens] = create_block_mask(lambda b, h, i, j: i >= j, None, None, tokens, tokens,
                                              device="cpu")
        return compiled(q, k, v, block_mask=masks[tokens])

    return attend


def check(name, attend, shape, data):
    """The largest error on the small problem; another result than the reference's is refused."""
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)
    numbers = numbers.view(4, 1, CHECK_HEADS, CHECK_TOKENS, shape.head_dim)
    q, k, v = (part.to(dtype_of(shape)) for part in numbers[:3])
    error = (attend(q, k, v).float() - numbers[3]).abs().max().item()
    if not error <= (1e-4 if shape.type == "fp32" else 3e-2):
        raise RuntimeError(f"{name} computes something else: error {error}")
    return error


def dtype_of(shape):
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.type]


def make_rows(shape, check_data):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, shape.heads, shape.tokens, shape.head_dim).to(dtype_of(shape))
               for _ in range(3))
    rows = []
    for name, make in (("PyTorch SDPA", sdpa), ("PyTorch FlexAttention", flex)):
        attend = make()
        try:
            error = check(name, attend, shape, check_data)
        except Exception as problem:  # no compiler, or a type that is not supported
            print(f"{name} is left out: {str(problem).splitlines()[0]}")
            continue
        rows.append(Row(f"{name} {torch.__version__}", lambda a=attend: a(q, k, v), error))
    return rows
