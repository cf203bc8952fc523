#!/usr/bin/env python3
"""Dense causal attention, or its gradient, by this library and by others, one thread, one table.

In each round every library computes the same once, in turn; ratios are medians of the rounds'
ratios, times are processor time. C++ libraries run in the program `peers`, PyTorch, where it is
installed, in this one. Each result was compared with focus::reference first.
"""
import argparse
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time

# Before anything that has threads is loaded.
for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[variable] = "1"

import torch_peers  # noqa: E402


class Program:
    """`peers` at one shape, waiting for rounds."""

    def __init__(self, path, shape):
        command = [path, "--pass", shape.direction, "--type", shape.type,
                   "--tokens", str(shape.tokens), "--head-dim", str(shape.head_dim),
                   "--heads", str(shape.heads)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                        text=True)
        self.limits, self.errors = [], {}
        for kind, *fields in self.lines_until("ready"):
            if kind == "limit":
                self.limits.append(fields)
            else:
                self.errors[fields[0]] = float(fields[1])

    def lines_until(self, last):
        for line in self.process.stdout:
            if line.strip() == last:
                return
            yield line.rstrip("\n").split("\t")
        sys.exit(f"compare.py: peers ended with status {self.process.wait()}")

    def round(self):
        """The seconds of each peer."""
        self.process.stdin.write("round\n")
        self.process.stdin.flush()
        return {name: float(seconds) for name, seconds in self.lines_until("end")}

    def close(self):
        self.process.stdin.close()
        self.process.wait()


def load_check(program, shape):
    """The inputs and expected results of a small problem, as bytes of floats; see peers.cpp."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder) / "check"
        subprocess.run([program, "--pass", shape.direction, "--type", shape.type,
                        "--head-dim", str(shape.head_dim), "--check-file", str(file)], check=True)
        return file.read_bytes()


def seconds_of(call):
    start = time.process_time()
    call()
    return time.process_time() - start


def measure(program_path, shape, rounds):
    program = Program(program_path, shape)
    errors = program.errors
    rows = []
    if torch_peers.MISSING is None:
        rows = torch_peers.make_rows(shape, load_check(program_path, shape))
    errors.update({row.name: row.error for row in rows})
    times = {name: [] for name in errors}
    for number in range(rounds + 1):
        seconds = program.round()
        seconds.update({row.name: seconds_of(row.run) for row in rows})
        if number > 0:  # the first warms up
            for name, value in seconds.items():
                times[name].append(value)
    program.close()
    return program.limits, errors, times


def print_table(shape, limits, errors, times):
    # Operations of a pair: two products forward; backward five, the scores made again among them.
    # Tensors that are moved: q, k, v and out, and backward the gradients of all four.
    products, tensors = {"forward": (2, 4), "backward": (5, 8)}[shape.direction]
    exps = shape.heads * shape.tokens * (shape.tokens + 1) / 2
    flops = 2 * products * shape.head_dim * exps
    moved = (tensors * shape.heads * shape.tokens * shape.head_dim *
             (4 if shape.type == "fp32" else 2))
    work = {"GFLOP/s": flops, "G/s": exps, "GB/s": moved}
    peak = next(float(value) for name, _, value in limits if name.startswith("FMA"))
    focus = times["focus"]
    print(f"\n{shape.direction}, {shape.type}, {shape.tokens} tokens, {shape.heads} heads, "
          f"head dimension {shape.head_dim}")
    print(f"{'':34} {'ms':>9} {'GFLOP/s':>8} {'of FMA':>7} {'time/focus':>10} {'error':>8}")
    for name, own in times.items():
        middle = statistics.median(own)
        rate = flops / middle / 1e9
        ratio = statistics.median(a / b for a, b in zip(own, focus))
        print(f"{name:34} {1e3 * middle:9.2f} {rate:8.1f} {100 * rate / peak:6.1f}% "
              f"{ratio:9.2f}x {errors[name]:8.0e}")
    for name, unit, value in limits:
        least = work[unit] / (1e9 * float(value))
        print(f"{'limit: ' + name:34} {1e3 * least:9.2f} {'':8} {'':7} "
              f"{least / statistics.median(focus):9.2f}x          {value} {unit}", flush=True)


def parse_arguments():
    def numbers(text):
        return [int(item) for item in text.split(",")]

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="peers, as built with -DFOCUS_BENCH_PEERS=ON")
    parser.add_argument("--tokens", type=numbers, default=[1024, 4096])
    parser.add_argument("--head-dim", type=numbers, default=[64, 128])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--pass", dest="directions", type=lambda text: text.split(","),
                        default=["forward"], help="forward, backward or both")
    parser.add_argument("--types", type=lambda text: text.split(","), default=["fp32"],
                        help="fp32, bf16 or both (bf16: this library and PyTorch)")
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


def main():
    arguments = parse_arguments()
    if torch_peers.MISSING is not None:
        print(f"PyTorch is left out: {torch_peers.MISSING}")
    for direction, type_name, tokens, head_dim in itertools.product(
            arguments.directions, arguments.types, arguments.tokens, arguments.head_dim):
        shape = torch_peers.Shape(direction, type_name, tokens, arguments.heads, head_dim)
        print_table(shape, *measure(arguments.program, shape, arguments.rounds))


if __name__ == "__main__":
    main()
