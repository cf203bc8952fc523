#!/usr/bin/env python3
"""Reads the novels out of the R package janeaustenr, without R.

    read_novels.py PATH/TO/janeaustenr/data OUTPUT_FOLDER

R keeps the objects of a package in a lazy-load database: Rdata.rdx is a compressed, serialised list that gives each
object's offset and length in Rdata.rdb; there each object is a compressed, serialised value of its own. A novel is a
character vector with one element a line. Written as OUTPUT_FOLDER/NAME.txt: the lines joined by newlines, the whole
split at every blank line into paragraphs, each paragraph put on one line, and the paragraphs joined by blank lines.
"""

import bz2
import gzip
import lzma
import os
import pathlib
import struct
import sys
import zlib


class Reader:
    """R's serialisation format in XDR (big-endian) form, as far as lists of numbers and strings need it."""

    NIL, PAIRLIST, SYMBOL, CHARSXP, LOGICAL, INTEGER = 0, 2, 1, 9, 10, 13
    STRINGS, LIST, REFERENCE, NIL_VALUE = 16, 19, 255, 254
    HAS_ATTRIBUTES, HAS_TAG = 1 << 9, 1 << 10
    LATIN1 = 1 << (12 + 2)

    def __init__(self, data):
        self.data = data
        self.offset = 0
        self.symbols = []
        if self.take(2) != b"X\n":
            raise ValueError("not in R's binary XDR format")
        version = self.integer()
        self.take(8)  # versions of R: the writer's, and the oldest that can read this
        if version == 3:
            self.take(self.integer())  # name of the native encoding
        elif version != 2:
            raise ValueError(f"serialisation version {version} is not supported (2 and 3 are)")

    def take(self, count):
        if count < 0 or self.offset + count > len(self.data):
            raise ValueError("ends too early")
        piece = self.data[self.offset : self.offset + count]
        self.offset += count
        return piece

    def integer(self):
        return struct.unpack(">i", self.take(4))[0]

    def value(self):
        """The next value; a list with names becomes a dict."""
        flags = self.integer()
        kind = flags & 0xFF
        if kind in (self.NIL, self.NIL_VALUE):
            return None
        if kind == self.SYMBOL:
            self.symbols.append(self.value())
            return self.symbols[-1]
        if kind == self.REFERENCE:
            return self.symbols[(flags >> 8) - 1]
        if kind == self.PAIRLIST:
            return self.pairlist(flags)
        length = self.integer()
        if kind == self.CHARSXP:
            encoding = "latin-1" if flags & self.LATIN1 else "utf-8"
            return None if length == -1 else self.take(length).decode(encoding)
        if kind in (self.LOGICAL, self.INTEGER):
            result = list(struct.unpack(f">{length}i", self.take(4 * length)))
        elif kind in (self.STRINGS, self.LIST):
            result = [self.value() for _ in range(length)]
        else:
            raise ValueError(f"values of R's type {kind} are not supported")
        if flags & self.HAS_ATTRIBUTES:
            names = self.value().get("names")
            if names:
                return dict(zip(names, result))
        return result

    def pairlist(self, flags):
        result = {}
        while flags & 0xFF == self.PAIRLIST:
            if flags & self.HAS_ATTRIBUTES:
                self.value()
            tag = self.value() if flags & self.HAS_TAG else None
            result[tag] = self.value()
            flags = self.integer()
        return result


def decompress(entry):
    """One entry of an .rdb: the length of its content, then zlib, or a letter for the method and bzip2 or xz."""
    length, body = struct.unpack(">I", entry[:4])[0], entry[4:]
    if body[:1] == b"2":
        content = bz2.decompress(body[1:])
    elif body[:1] == b"Z":
        filters = [{"id": lzma.FILTER_LZMA2, "preset": 6}]
        content = lzma.decompress(body[1:], lzma.FORMAT_RAW, filters=filters)
    else:
        content = zlib.decompress(body)
    if len(content) != length:
        raise ValueError("an entry of Rdata.rdb is damaged")
    return content


def novels(folder):
    """Name and lines of each novel in a package's data folder."""
    index = Reader(gzip.decompress((folder / "Rdata.rdx").read_bytes())).value()
    database = (folder / "Rdata.rdb").read_bytes()
    for name, (offset, length) in index["variables"].items():
        yield name, Reader(decompress(database[offset : offset + length])).value()


def paragraphs(lines):
    pieces = "\n".join(lines).split("\n\n")
    return "\n\n".join(piece.replace("\n", " ") for piece in pieces)


def main():
    if len(sys.argv) != 3:
        sys.exit(f"usage: {sys.argv[0]} PATH/TO/janeaustenr/data OUTPUT_FOLDER")
    source, output = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2])
    try:
        output.mkdir(parents=True, exist_ok=True)
        for name, lines in novels(source):
            temporary = output / f".{name}.txt.part"
            temporary.write_text(paragraphs(lines), encoding="utf-8", newline="\n")
            os.replace(temporary, output / f"{name}.txt")
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, IndexError,
            struct.error, zlib.error, lzma.LZMAError) as problem:
        sys.exit(f"{sys.argv[0]}: {source}: cannot read the novels: {problem}")


if __name__ == "__main__":
    main()
