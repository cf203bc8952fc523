"""PyTorch's attention on one thread, for compare.py: SDPA and FlexAttention, and SDPA's gradient
(FlexAttention has none on CPUs).

MISSING says why there are no rows, or is None. Each row computes dense causal attention of a shape,
or its gradient, and has been compared with focus::reference on a small problem.
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
    direction: str  # forward or backward
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


def sdpa_backward():
    """The gradient alone: the forward pass is made once, when new inputs come."""
    made = None  # what came, the leaves made of it, and their output

    def gradients(q, k, v, dout):
        nonlocal made
        if made is None or made[0] is not q:
            with torch.enable_grad():
                leaves = tuple(x.clone().requires_grad_() for x in (q, k, v))
                made = q, leaves, sdpa()(*leaves)
        _, leaves, out = made
        return torch.autograd.grad(out, leaves, dout, retain_graph=True)

    return gradients


PEERS = {"forward": (("PyTorch SDPA", sdpa), ("PyTorch FlexAttention", flex)),
         "backward": (("PyTorch SDPA", sdpa_backward),)}


def check(name, run, shape, data):
    """The largest error on the small problem; another result than the reference's is refused."""
    numbers = torch.frombuffer(bytearray(data), dtype=torch.float32)
    numbers = numbers.view(-1, 1, CHECK_HEADS, CHECK_TOKENS, shape.head_dim)
    count = input_count(shape)
    results = run(*(part.to(dtype_of(shape)) for part in numbers[:count]))
    results = results if isinstance(results, tuple) else (results,)
    error = max((got.float() - expected).abs().max().item()
                for got, expected in zip(results, numbers[count:]))
    if not error <= (1e-4 if shape.type == "fp32" else 3e-2):
        raise RuntimeError(f"{name} computes something else: error {error}")
    return error


def input_count(shape):
    """Q, K and V, and the gradient of the output."""
    return 4 if shape.direction == "backward" else 3


def dtype_of(shape):
    return {"fp32": torch.float32, "bf16": torch.bfloat16}[shape.type]


def make_rows(shape, check_data):
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    torch.manual_seed(1)
    inputs = [torch.randn(1, shape.heads, shape.tokens, shape.head_dim).to(dtype_of(shape))
              for _ in range(input_count(shape))]
    rows = []
    for name, make in PEERS[shape.direction]:
        run = make()
        try:
            error = check(name, run, shape, check_data)
        except Exception as problem:  # no compiler, or a type that is not supported
            print(f"{name} is left out: {str(problem).splitlines()[0]}")
            continue
        rows.append(Row(f"{name} {torch.__version__}", lambda r=run: r(*inputs), error))
    return rows
