#!/usr/bin/env python3
"""Text of HTML pages: strip_html.py OUT.txt PAGE.html...

Paragraphs, headings and list items become lines of their own; runs of white space become one space; scripts, styles and
the page's head are left out.
"""
import html.parser
import pathlib
import sys

BLOCKS = {"p", "div", "br", "li", "ul", "ol", "tr", "td", "h1", "h2", "h3", "h4", "h5", "h6", "blockquote", "hr", "pre"}
HIDDEN = {"script", "style", "head"}


class TextOfPage(html.parser.HTMLParser):
    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.blocks, self.hidden = [[]], 0

    def handle_starttag(self, tag, attrs):
        self.hidden += tag in HIDDEN
        if tag in BLOCKS:
            self.blocks.append([])

    def handle_endtag(self, tag):
        self.hidden -= tag in HIDDEN
        if tag in BLOCKS:
            self.blocks.append([])

    def handle_data(self, data):
        if self.hidden <= 0:
            self.blocks[-1].append(data)

    def text(self):
        lines = (" ".join("".join(block).split()) for block in self.blocks)
        return "\n\n".join(line for line in lines if line)


def text_of(path):
    page = TextOfPage()
    page.feed(path.read_text(encoding="utf-8", errors="replace"))
    page.close()
    return page.text()


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    pages = [text_of(pathlib.Path(name)) for name in sys.argv[2:]]
    pathlib.Path(sys.argv[1]).write_text("\n\n".join(pages) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
