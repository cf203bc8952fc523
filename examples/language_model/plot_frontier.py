#!/usr/bin/env python3
"""Draws what `language_model perplexity --json FILE` measured: perplexity against the share of the pairs computed, and
against the speedup of attention.

    plot_frontier.py FILE.json [FILE.json ...] -o FILE.svg

Several files are drawn as one, for instance with routers of different K; the rows for full attention and for window and
sinks alone are taken from the first. Needs nothing but Python.
"""
import argparse
import html
import json
import math
import pathlib

WIDTH, HEIGHT = 860, 400
TOP, BOTTOM = 60, 340
PANELS = [(70, 400), (500, 830)]
COLOURS = ["#1b6ca8", "#d1495b", "#3a7d44", "#8d5fa8", "#c77d0a", "#0f8b8d"]


def read_rows(paths):
    rows = []
    for number, path in enumerate(paths):
        with open(path, encoding="utf-8") as file:
            for row in json.load(file)["rows"]:
                if number == 0 or "groups" in row:
                    rows.append(row)
    return rows


def text(x, y, content, anchor="middle", size=12, colour="#222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}">{html.escape(content)}</text>')


def line(x1, y1, x2, y2, style):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def steps(low, high):
    """Some four round numbers in [low, high]."""
    size = 10.0 ** math.floor(math.log10((high - low) / 3))
    size *= next(factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= 6)
    first = math.ceil(low / size)
    return [n * size for n in range(first, math.floor(high / size) + 1)]


class Panel:
    def __init__(self, number, rows, value, name, log):
        self.left, self.right = PANELS[number]
        self.value, self.name, self.log = value, name, log
        values = [self.scaled(value(row)) for row in rows]
        self.low, self.high = min(values), max(values)
        perplexities = [row["perplexity"] for row in rows]
        self.bottom = math.floor(min(perplexities))
        self.top = math.ceil(max(perplexities))

    def scaled(self, value):
        return math.log2(value) if self.log else value

    def x(self, value):
        share = (self.scaled(value) - self.low) / ((self.high - self.low) or 1)
        return self.left + share * (self.right - self.left)

    def y(self, perplexity):
        return BOTTOM - (perplexity - self.bottom) / (self.top - self.bottom) * (BOTTOM - TOP)

    def grid(self):
        for p in steps(self.bottom, self.top):
            yield line(self.left, self.y(p), self.right, self.y(p), 'stroke="#ddd"')
            yield text(self.left - 8, self.y(p) + 4, f"{p:g}", "end")
        marks = ([2.0**n for n in range(math.ceil(self.low), math.floor(self.high) + 1)]
                 if self.log else steps(self.low, self.high))
        for value in marks:
            yield line(self.x(value), BOTTOM, self.x(value), BOTTOM + 5, 'stroke="#888"')
            yield text(self.x(value), BOTTOM + 20, f"{value:g}x" if self.log else f"{value:.0%}")
        yield text((self.left + self.right) / 2, BOTTOM + 42, self.name)
        yield text(self.left, TOP - 12, "perplexity", "start")

    def draw(self, curves, others):
        yield from self.grid()
        for row in others:
            y = self.y(row["perplexity"])
            yield line(self.left, y, self.right, y, 'stroke="#555" stroke-dasharray="2 4"')
            yield text(self.right, y - 5, row["attention"], "end", 11, "#555")
        for (groups, rows), colour in zip(curves, COLOURS):
            points = sorted((self.x(self.value(row)), self.y(row["perplexity"])) for row in rows)
            corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            yield f'<polyline points="{corners}" fill="none" stroke="{colour}" stroke-width="2"/>'
            for x, y in points:
                yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>'


def label(row):
    query, key = row["top_k"], row.get("key_top_k", row["top_k"])
    return f"top-{query}" if query == key else f"top-{query}:{key}"


def draw(rows, title):
    groups = sorted({row["groups"] for row in rows if "groups" in row})
    curves = [(k, sorted((row for row in rows if row.get("groups") == k),
                         key=lambda row: row["pairs"])) for k in groups]
    others = [row for row in rows if "groups" not in row]
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           f'font-family="sans-serif">')
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield text(PANELS[0][0], 24, title, "start", 13)
    yield from Panel(0, rows, lambda row: row["pairs"], "pairs computed", False).draw(curves, others)
    yield from Panel(1, rows, lambda row: row["speedup"], "speedup of attention", True).draw(curves, others)
    for number, ((k, of_k), colour) in enumerate(zip(curves, COLOURS)):
        x = PANELS[0][0] + 150 * number
        yield f'<circle cx="{x + 4:.1f}" cy="{HEIGHT - 8:.1f}" r="3.5" fill="{colour}"/>'
        yield text(x + 12, HEIGHT - 4, f"K = {k}: " + ", ".join(label(row) for row in of_k), "start", 11)
    yield "</svg>"


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("files", nargs="+", type=pathlib.Path, metavar="FILE.json")
    parser.add_argument("-o", "--output", required=True, type=pathlib.Path, metavar="FILE.svg")
    parser.add_argument("--title", default="Perplexity under Focus attention")
    options = parser.parse_args()
    svg = "\n".join(draw(read_rows(options.files), options.title)) + "\n"
    options.output.write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
