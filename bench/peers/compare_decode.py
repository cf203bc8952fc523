#!/usr/bin/env python3
"""A step of generation by `decode` and by PyTorch's SDPA, in alternating rounds.

usage: compare_decode.py build/native/bench/decode [--threads N] [--rounds N] [--heads H] [--kv-heads H]
       [--head-dim D] [--tokens 2K,64K] [--types f32,bf16,f16]

PyTorch has the keys of each kv head side by side, its best layout, and enable_gqa where heads share
them. GB/s: bytes of K and V, once for each kv head, a second.
"""
import argparse
import re
import statistics
import subprocess
import time

import torch

TYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


def count(text):
    return int(text[:-1]) * 1024 if text.endswith("K") else int(text)


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--tokens", default="2K,4K,64K")
    parser.add_argument("--types", default="f32,bf16,f16")
    return parser.parse_args()


def ours(o, tokens, name):
    """Seconds of a dense step, and of one with K = 8."""
    out = subprocess.run(
        [o.program, "--tokens", str(tokens), "--types", name, "--threads", str(o.threads), "--rounds", "3",
         "--heads", str(o.heads), "--kv-heads", str(o.kv_heads), "--head-dim", str(o.head_dim), "--groups", "8"],
        check=True, capture_output=True, text=True).stdout
    rows = re.findall(rf"^{name} +(\w+) +([0-9.]+)", out, re.MULTILINE)
    return {kind: float(ms) / 1e3 for kind, ms in rows}


def sdpa(o, tokens, name):
    """A function that computes one step."""
    torch.manual_seed(1)
    q = torch.randn(1, o.heads, 1, o.head_dim).to(TYPES[name])
    k, v = (torch.randn(1, o.kv_heads, tokens, o.head_dim).to(TYPES[name]) for _ in range(2))
    gqa = o.heads != o.kv_heads
    return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=gqa)


def seconds_a_call(step, at_least=0.05):
    step()
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < at_least:
        step()
        calls += 1
    return (time.perf_counter() - start) / calls


def main():
    o = options()
    torch.set_num_threads(o.threads)
    torch.set_grad_enabled(False)
    print(f"PyTorch {torch.__version__}, {o.heads}:{o.kv_heads} heads, head_dim {o.head_dim}, {o.threads} threads, "
          f"{o.rounds} rounds, medians")
    print(f"{'tokens':>7} {'type':>5} {'PyTorch ms':>11} {'GB/s':>6} {'dense ms':>9} {'GB/s':>6} {'times':>6} "
          f"{'K=8 ms':>8} {'times':>6}")
    for tokens in map(count, o.tokens.split(",")):
        for name in o.types.split(","):
            step = sdpa(o, tokens, name)
            theirs, dense, sparse = [], [], []
            for _ in range(o.rounds):
                theirs.append(seconds_a_call(step))
                row = ours(o, tokens, name)
                dense.append(row["dense"])
                sparse.append(row["8"])
            t, d, s = map(statistics.median, (theirs, dense, sparse))
            gigabytes = o.kv_heads * tokens * 2 * o.head_dim * TYPES[name].itemsize / 1e9
            print(f"{tokens:7} {name:>5} {t * 1e3:11.3f} {gigabytes / t:6.1f} {d * 1e3:9.3f} {gigabytes / d:6.1f} "
                  f"{t / d:5.1f}x {s * 1e3:8.3f} {t / s:5.1f}x", flush=True)


if __name__ == "__main__":
    main()
