"""Focus attention from Python, by ctypes: the library of this folder, nothing else. Bad arguments raise ValueError.

python3 focus_dispatch.py LIBRARY   checks each instruction set of this processor against the definition
"""
import array
import ctypes
import math
import sys


class Problem(ctypes.Structure):
    _fields_ = [(name, ctypes.c_int64) for name in
                ("heads", "kv_heads", "n_q", "n_k", "head_dim", "value_dim", "window", "sink_tokens")]


class Library:
    def __init__(self, path):
        self._lib = ctypes.CDLL(path)
        self._lib.focus_instruction_set.restype = ctypes.c_char_p
        self._lib.focus_instruction_set.argtypes = [ctypes.c_int]
        self._lib.focus_sparse_attention.restype = ctypes.c_int
        self._lib.focus_sparse_attention.argtypes = (
            [ctypes.c_char_p, ctypes.POINTER(Problem)] + [ctypes.c_void_p] * 7 + [ctypes.c_char_p, ctypes.c_size_t])

    def instruction_sets(self):
        """Those of this processor, best first."""
        names = []
        while (name := self._lib.focus_instruction_set(len(names))) is not None:
            names.append(name.decode())
        return names

    def sparse_attention(self, problem, q, k, v, query_masks, key_masks, out, lse=None, instruction_set=None):
        """Writable buffers: float32 (masks: uint64), in the order that focus_dispatch.h names; array.array or NumPy's."""
        p = problem
        wanted = [("q", q, "f", p.n_q * p.heads * p.head_dim), ("k", k, "f", p.n_k * p.kv_heads * p.head_dim),
                  ("v", v, "f", p.n_k * p.kv_heads * p.value_dim), ("query_masks", query_masks, "QL", p.n_q),
                  ("key_masks", key_masks, "QL", p.n_k), ("out", out, "f", p.n_q * p.heads * p.value_dim)]
        if lse is not None:
            wanted.append(("lse", lse, "f", p.heads * p.n_q))
        pointers = []
        for name, buffer, formats, length in wanted:
            view = memoryview(buffer)
            size = 4 if formats == "f" else 8
            if view.format not in formats or view.itemsize != size or not view.c_contiguous or view.nbytes != size * length:
                raise ValueError(f"{name}: expected {length} contiguous elements of type {formats[0]}, "
                                 f"got {view.nbytes // view.itemsize} of {view.format}")
            flat = view.cast("B")
            pointers.append(ctypes.addressof((ctypes.c_char * len(flat)).from_buffer(flat)) if len(flat) else None)
        if lse is None:
            pointers.append(None)
        message = ctypes.create_string_buffer(400)
        status = self._lib.focus_sparse_attention(instruction_set.encode() if instruction_set else None, ctypes.byref(p),
                                                  *pointers, message, len(message))
        if status != 0:
            raise {1: ValueError, 2: MemoryError}.get(status, RuntimeError)(message.value.decode())


def check(library):
    n, heads, d = 60, 2, 8
    p = Problem(heads, 1, n, n, d, d, 5, 1)
    q = array.array("f", (math.sin(3.0 * i) for i in range(n * heads * d)))
    k = array.array("f", (math.cos(5.0 * i) for i in range(n * d)))
    v = array.array("f", (math.sin(7.0 * i) for i in range(n * d)))
    masks = array.array("Q", (1 << (i * i % 4) for i in range(n)))
    for name in library.instruction_sets():
        out, lse = array.array("f", bytes(4 * n * heads * d)), array.array("f", bytes(4 * n * heads))
        library.sparse_attention(p, q, k, v, masks, masks, out, lse, name)
        worst = 0.0
        for i in range(n):
            for h in range(heads):
                row = q[(i * heads + h) * d:][:d]
                keys = [j for j in range(i + 1) if i - j <= 5 or j < 1 or masks[i] & masks[j]]
                weights = [math.exp(sum(a * b for a, b in zip(row, k[j * d:][:d])) / math.sqrt(d)) for j in keys]
                worst = max(worst, abs(math.log(sum(weights)) - lse[h * n + i]))
                for c in range(d):
                    truth = sum(w * v[j * d + c] for w, j in zip(weights, keys)) / sum(weights)
                    worst = max(worst, abs(truth - out[(i * heads + h) * d + c]))
        print(f"{name}: error {worst:.1e}")
        assert worst < 2e-6, name
    for bad in (dict(instruction_set="avx1024"), dict(lse=array.array("f", [0.0])), dict(out=array.array("d", out))):
        try:
            library.sparse_attention(**(dict(problem=p, q=q, k=k, v=v, query_masks=masks, key_masks=masks, out=out) | bad))
        except ValueError as error:
            print("ValueError:", error)
        else:
            raise AssertionError(f"not refused: {bad}")
    p.window = -5
    try:
        library.sparse_attention(p, q, k, v, masks, masks, out)
    except ValueError as error:
        print("ValueError:", error)
    else:
        raise AssertionError("a window of -5 is not refused")


if __name__ == "__main__":
    check(Library(sys.argv[1]))
