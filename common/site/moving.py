"""The course's moving pictures in a notebook: `show_moving("softmax")`.

A picture is shown twice: as an image of one state, which every viewer shows, and as a page in a frame, which moves.
Viewers remove the frame from a notebook that they do not trust, and then its inner text stands there; one that shows
the frame does not show the text.

`start` in pictures/shared.js says what a picture consists of. A new one is a page beside it, with a title and an
alternative text here, a number of steps in `stills`, and a `show_moving` in a chapter.
"""

import base64
import hashlib
import html
from pathlib import Path

from IPython.display import display
from PIL import Image

FOLDER = Path(__file__).parent / "pictures"
STYLE, SCRIPT = '<link rel="stylesheet" href="shared.css">', '<script src="shared.js"></script>'
WIDTH = 760  # of a still, in pixels of a page: a notebook's outputs are about so wide
TITLES = {
    "softmax": "The online softmax", "tiles": "Tiles and bytes", "masks": "Masks and the grid",
    "pipeline": "The pipeline of a multiprocessor", "ring": "A ring of ranks",
    "order": "A fixed order of additions",
}  # fmt: skip
ALTS = {  # what the stills show
    "softmax": "Four logits as bars; the third, 5, is a new maximum. l and acc, as bars below, shrink by "
    "exp(3 - 5) = 0.135; then the new term is added",
    "tiles": "Tiles of Q, K, V, S and O for 8 queries and 8 keys: the first program has written its part of "
    "O, the second computes its last tile of S, which raises the maximum of two queries: factors 0.082 and 0.368. "
    "Bytes moved so far: 352 tiled, 736 with S and P stored in fp16",
    "masks": "The tiles of S under a causal mask: full, masked, skipped. Below, the programs of four heads "
    "on six multiprocessors, one bar for each",
    "pipeline": "Timelines of the copy engine, the tensor cores, the exponential unit, the producer and two "
    "consumers over the first tiles of keys",
    "ring": "Four ranks in a row. Each keeps its queries and holds the keys and values of another rank. Below, the "
    "pairs of a chunk of queries and a chunk of keys: a number in those that are computed is their step, 0, 1 or 2",
    "order": "A row for each of six programs under a causal mask, low keys first. The first adds to one tile of "
    "queries after another; in the rows below a part waits, hatched, the longer the higher the tile of keys",
}
INSTEAD = "In a notebook that you trust, this picture moves."


def still(name: str) -> Path:
    """The image of a picture, made by `python -m common.site.stills`."""
    return FOLDER / f"{name}.png"


def page(name: str) -> str:
    """The picture as one page that asks for no other file."""
    text = (FOLDER / f"{name}.html").read_text()
    text = text.replace(STYLE, f"<style>\n{(FOLDER / 'shared.css').read_text()}</style>")
    return text.replace(SCRIPT, f"<script>\n{(FOLDER / 'shared.js').read_text()}</script>")


def digest(name: str) -> str:
    """What a still must carry to belong to the picture as it is now."""
    return hashlib.sha256(page(name).encode()).hexdigest()


def show_moving(name: str) -> None:
    """Display a moving picture; name: a key of TITLES. Raises ValueError if there is no such picture."""
    if name not in TITLES:
        raise ValueError(f"name: expected one of {', '.join(TITLES)}, got {name!r}")
    image = base64.b64encode(still(name).read_bytes()).decode()
    metadata = {"image/png": {"alt": ALTS[name], "still": name, "width": WIDTH}}
    display({"image/png": image, "text/plain": ALTS[name]}, metadata=metadata, raw=True)
    display({"text/html": framed(name), "text/plain": INSTEAD}, raw=True)


def framed(name: str) -> str:
    """The picture's whole page inside a frame, as high as its still at the still's width."""
    with Image.open(still(name)) as image:
        height = image.height * WIDTH // image.width
    whole = html.escape(page(name), quote=False).replace("'", "&#39;")
    style = f'style="width: 100%; height: {height}px; border: 0"'
    return f"""<iframe title="{TITLES[name]}" sandbox="allow-scripts" {style} srcdoc='{whole}'>{INSTEAD}</iframe>"""
