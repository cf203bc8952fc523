#!/usr/bin/env python3
"""Draws the table that `speedup --csv FILE` wrote: speedup over dense attention against tokens.

    plot_speedup.py FILE.csv [FILE.svg]

One curve for each K and k, with the ideal (causal pairs / computed pairs) dotted. Only the rows of
the first storage type, head dimension and kind of masks in the file are drawn. Needs nothing but
Python.
"""
import csv
import html
import math
import pathlib
import sys

WIDTH, HEIGHT = 760, 430
LEFT, RIGHT, TOP, BOTTOM = 60, 600, 50, 375
COLOURS = ["#1b6ca8", "#d1495b", "#3a7d44", "#8d5fa8", "#c77d0a", "#4d5566", "#0f8b8d", "#a23b72"]


def read_curves(path):
    """The settings that all curves share, and {(K, k): [(tokens, speedup, ideal), ...]}."""
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    if not rows:
        sys.exit(f"plot_speedup.py: {path} has no rows")
    first, curves = rows[0], {}
    for row in rows:
        if all(row[key] == first[key] for key in ("type", "head_dim", "masks")):
            points = curves.setdefault((int(row["groups"]), int(row["top_k"])), [])
            points.append((int(row["tokens"]), float(row["speedup"]), float(row["ideal_speedup"])))
    return first, {key: sorted(points) for key, points in curves.items()}


class Axes:
    """Both logarithmic; x in tokens, y in times dense."""

    def __init__(self, curves):
        points = [point for curve in curves.values() for point in curve]
        self.tokens = sorted({point[0] for point in points})
        values = [value for point in points for value in point[1:]] + [1.0]
        self.low = math.floor(math.log2(min(values)))
        self.high = max(math.ceil(math.log2(max(values))), self.low + 1)

    def x(self, tokens):
        low, high = math.log2(self.tokens[0]), math.log2(self.tokens[-1])
        share = (math.log2(tokens) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (RIGHT - LEFT)

    def y(self, value):
        return BOTTOM - (math.log2(value) - self.low) / (self.high - self.low) * (BOTTOM - TOP)


def text(x, y, content, anchor="start", size=12, colour="#222"):
    return (f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-size="{size}" '
            f'fill="{colour}">{html.escape(content)}</text>')


def line(x1, y1, x2, y2, style):
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" {style}/>'


def path(points, style):
    corners = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{corners}" fill="none" {style}/>'


def short(tokens):
    return f"{tokens // 1024}K" if tokens % 1024 == 0 else str(tokens)


def grid(axes):
    for power in range(axes.low, axes.high + 1):
        y = axes.y(2.0**power)
        yield line(LEFT, y, RIGHT, y, 'stroke="#888"' if power == 0 else 'stroke="#ddd"')
        yield text(LEFT - 8, y + 4, f"{2.0**power:g}x", "end")
    for tokens in axes.tokens:
        x = axes.x(tokens)
        yield line(x, BOTTOM, x, BOTTOM + 5, 'stroke="#888"')
        yield text(x, BOTTOM + 20, short(tokens), "middle")
    yield text((LEFT + RIGHT) / 2, BOTTOM + 40, "tokens", "middle")


def draw(settings, curves):
    axes = Axes(curves)
    title = ("Focus over dense attention: {type}, {heads} heads, head dimension {head_dim}, "
             "{masks} groups, window {window}, threads {threads}").format(**settings)
    yield (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
           f'font-family="sans-serif">')
    yield f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>'
    yield text(LEFT, TOP - 22, title, size=13)
    yield from grid(axes)
    for number, ((groups, top_k), points) in enumerate(sorted(curves.items())):
        colour = COLOURS[number % len(COLOURS)]
        measured = [(axes.x(tokens), axes.y(speedup)) for tokens, speedup, _ in points]
        ideal = [(axes.x(tokens), axes.y(best)) for tokens, _, best in points]
        yield path(ideal, f'stroke="{colour}" stroke-dasharray="2 4"')
        yield path(measured, f'stroke="{colour}" stroke-width="2"')
        for x, y in measured:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>'
        y = TOP + 20 * number + 6
        yield line(RIGHT + 16, y - 4, RIGHT + 40, y - 4, f'stroke="{colour}" stroke-width="2"')
        yield text(RIGHT + 46, y, f"K = {groups}, top-{top_k}")
    y = TOP + 20 * len(curves) + 16
    yield line(RIGHT + 16, y - 4, RIGHT + 40, y - 4, 'stroke="#555" stroke-dasharray="2 4"')
    yield text(RIGHT + 46, y, "pairs saved")
    yield "</svg>"


def main():
    if len(sys.argv) not in (2, 3) or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    source = pathlib.Path(sys.argv[1])
    target = pathlib.Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_suffix(".svg")
    target.write_text("\n".join(draw(*read_curves(source))) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
