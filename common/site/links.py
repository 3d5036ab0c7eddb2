"""Links that the texts do not spell out, since they are read in notebooks too.

"[tiling](tiling.ipynb), section 2.2" leads to that section, "exercise 4.1" to its page, "arXiv 2205.14135" to the
paper. Sphinx calls `add` for each page when it has read all of them.
"""

import re
from collections.abc import Iterator

from common.learn import exercises

from docutils import nodes
from sphinx.application import Sphinx

SECTION = re.compile(r",\s+(?:section\s+)?(\d+(?:\.\d+)*)")
EXERCISES = re.compile(r"[Ee]xercises? \d+\.\d+(?:(?:,| and|, and) \d+\.\d+)*")
PAPER = re.compile(r"(?:\barXiv )?\b\d{4}\.\d{5}\b")
NOT_PROSE = nodes.reference, nodes.literal, nodes.FixedTextElement, nodes.raw, nodes.title


def add(app: Sphinx, doctree: nodes.document, page: str) -> None:
    """Complete the links of a page, whose name is `page`."""
    here = app.builder.get_target_uri(page)
    for link in doctree.findall(nodes.reference):
        behind = link.next_node(descend=False, siblings=True)
        if link.get("internal") and isinstance(behind, nodes.Text) and (section := SECTION.match(behind)):
            link["refuri"] = _at_section(app, page, link["refuri"], section[1])
    for text in list(doctree.findall(nodes.Text)):
        places = [] if isinstance(text.parent, NOT_PROSE) else sorted(_cited(app, here, text))
        if places:
            parts, done = [], 0
            for start, end, address in places:
                parts += [
                    nodes.Text(text[done:start]),
                    nodes.reference(text[start:end], text[start:end], refuri=address),
                ]
                done = end
            text.parent.replace(text, [*parts, nodes.Text(text[done:])])


def _at_section(app: Sphinx, page: str, address: str, number: str) -> str:
    """The address with the anchor of a section, by its number; as it is, if its page has no such section."""
    targets = {app.builder.get_relative_uri(page, name): name for name in app.env.all_docs}
    for heading in app.env.tocs[targets[address]].findall(nodes.reference) if address in targets else ():
        if heading.astext().split()[:1] in ([number], [f"{number}."]):
            return address + heading["anchorname"]
    return address


def _cited(app: Sphinx, here: str, text: str) -> Iterator[tuple[int, int, str]]:
    """(start, end, address) of the exercises and papers that a text names."""
    pages = {e.number: f"exercises/{e.name}" for e in exercises.load()}
    for named in EXERCISES.finditer(text):
        for number in re.finditer(r"\d+\.\d+", named[0]):
            if number[0] in pages and not here.startswith(pages[number[0]]):
                start = named.start() + number.start()
                address = app.builder.get_relative_uri(here.removesuffix(".html"), pages[number[0]])
                yield start, start + len(number[0]), address
    for paper in PAPER.finditer(text):
        yield paper.start(), paper.end(), f"https://arxiv.org/abs/{paper[0].split()[-1]}"
