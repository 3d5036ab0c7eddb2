"""One look for every picture: a color means the same thing in all of them, and differs in lightness as well as in hue,
so that it also reads in grey."""

import textwrap

import matplotlib as mpl
import matplotlib.pyplot as plt
from IPython import get_ipython
from IPython.display import display
from matplotlib.patches import FancyArrowPatch, Rectangle

# Okabe-Ito colors, ordered so that neighbors in a picture differ in lightness.
COLORS = {
    "q": "#0072B2",  # blue
    "k": "#E69F00",  # orange
    "v": "#009E73",  # green
    "o": "#CC79A7",  # pink
    "s": "#8C8C8C",  # S and P: grey
    "state": "#D55E00",  # m, l, acc, the running state: vermilion
    "good": "#009E73",
    "bad": "#D55E00",
    "unfused": "#E69F00",  # S and P through memory
    "tiled": "#0072B2",  # ours
    "peer": "#56B4E9",  # somebody else's kernel
    "limit": "#000000",
    "faint": "#DDDDDD",
    "ink": "#222222",
}
# Light versions of them, so that text on them stays readable.
TINT = {"q": "#BFDCEE", "k": "#FBE3B3", "v": "#BFE5D9", "o": "#F1D9E6", "s": "#D6D6D6", "state": "#F6D3BC"}


def use() -> None:
    """Set the look: called by every picture; white background, so that pages with a dark theme show it well."""
    mpl.rc("figure", dpi=110, facecolor="white")
    mpl.rc("savefig", facecolor="white", bbox="tight")
    mpl.rc("font", size=10)
    mpl.rc("axes", titlesize=11, titleweight="bold", titlelocation="left")
    mpl.rc("axes.spines", top=False, right=False)
    mpl.rc("lines", linewidth=2)
    mpl.rc("legend", frameon=False)


def new(width: float = 8, height: float = 3.2, columns: int = 1, rows: int = 1, **kwargs):
    """A figure of `columns` axes side by side in each of `rows`, in the course's look."""
    use()
    return plt.subplots(rows, columns, figsize=(width, height), layout="constrained", **kwargs)


def drawing(width: float, height: float, columns: int = 1, rows: int = 1, *, aspect="auto", **kwargs):
    """As `new`, its axes without ticks and frame."""
    figure, axes = new(width, height, columns, rows, **kwargs)
    for ax in figure.axes:
        blank(ax)
        ax.set_aspect(aspect)
    return figure, axes


def show(figure, alt: str, *provenances: str) -> None:
    """Display a figure in a notebook, with an alternative text: what the picture shows, in words. provenances: where
    its numbers come from, `records.describe` of each record, to stand under it.

    The text stands in the output's text/plain, and as "alt" in its metadata. JupyterLab and GitHub show the image
    without it; pages made from a notebook can take it from there. A picture inside HTML would carry it, but both remove
    the image data from HTML that they do not trust.
    """
    if not alt.strip():
        raise ValueError("alt: say in words what the picture shows")
    if provenances:
        lines = [line for words in provenances for line in textwrap.wrap(words.replace("`", ""), 115)]
        figure.supxlabel("\n".join(lines), fontsize=7.5, color=COLORS["ink"])
    shell = get_ipython()
    if shell is None:  # a script
        plt.show()
        return
    data, metadata = shell.display_formatter.format(figure)
    data["text/plain"] = alt
    metadata.setdefault("image/png", {})["alt"] = alt
    display(data, metadata=metadata, raw=True)
    plt.close(figure)  # or it is shown again when the cell ends


def blank(ax) -> None:
    """For drawings: no ticks, no frame."""
    ax.set(xticks=[], yticks=[])
    ax.spines[:].set_visible(False)


def box(
    ax, x, y, text="", *, width=1, height=1, color="white", edge="white", line=1.2, ls="-", ink=None, size=9, bold=False
) -> None:
    """A rectangle with a text in its middle."""
    look = dict(facecolor=color, edgecolor=edge, linewidth=line, linestyle=ls)
    ax.add_patch(Rectangle((x, y), width, height, **look))
    middle = dict(ha="center", va="center", fontsize=size, color=ink or COLORS["ink"])
    ax.text(x + width / 2, y + height / 2, text, weight="bold" if bold else "normal", **middle)


def arrow(ax, start, end, color=COLORS["ink"]) -> None:
    """An arrow from point to point."""
    look = dict(arrowstyle="-|>", mutation_scale=11, shrinkA=0, shrinkB=0)
    ax.add_patch(FancyArrowPatch(start, end, color=color, lw=1.3, **look))
