"""The picture in the README: what the course builds. `python -m common.site.overview` draws it anew."""

from pathlib import Path

from common.arguments import arguments
from common.style import COLORS, drawing

import matplotlib.pyplot as plt
from matplotlib.patches import FancyBboxPatch, Rectangle

PATH = Path(__file__).with_name("overview.png")
TILES = 5
ROW = 3  # the tile of queries that is at work, counted from below
AT = 2  # the tile of keys that it meets


def draw() -> None:
    """One program of FlashAttention: a tile of queries walks over tiles of keys and values; only O leaves the chip."""
    fig, ax = drawing(8.4, 4.6, aspect="equal")
    ax.set(xlim=(-2.2, 13.9), ylim=(-3.2, 6.2))
    _draw_tiles(ax)
    _draw_chip(ax)
    fig.savefig(PATH, dpi=130)
    plt.close(fig)


def _draw_tiles(ax) -> None:
    """Q, K, V and O in tiles, and S between them."""
    for i in range(TILES):
        active = i == ROW
        ax.add_patch(Rectangle((-1.6, i), 1.1, 0.92, color=COLORS["q"], alpha=1 if active else 0.25))
        ax.add_patch(Rectangle((12.2, i), 1.1, 0.92, color=COLORS["o"], alpha=1 if active else 0.25))
        ax.add_patch(Rectangle((i, -1.55), 0.92, 1.1, color=COLORS["k"], alpha=1 if i == AT else 0.35))
        ax.add_patch(Rectangle((i, -2.85), 0.92, 1.1, color=COLORS["v"], alpha=1 if i == AT else 0.35))
        for j in range(TILES):
            box = Rectangle((j, i), 0.92, 0.92, facecolor="none", edgecolor=COLORS["faint"], linestyle=(0, (2, 2)))
            ax.add_patch(box)
    for j in range(AT + 1):
        shade = COLORS["s"] if j == AT else COLORS["faint"]
        ax.add_patch(Rectangle((j, ROW), 0.92, 0.92, color=shade))
    ax.annotate("", (TILES + 0.1, ROW + 0.46), (AT + 1.0, ROW + 0.46), arrowprops=dict(arrowstyle="->", lw=1.8))
    ax.text(AT + 0.46, ROW + 0.46, "$P_j$", ha="center", va="center", color="white", fontsize=11)

    ax.text(-1.05, 5.35, "Q", ha="center", color=COLORS["q"], fontsize=13, weight="bold")
    ax.text(-0.35, -1.0, "K", ha="center", va="center", color=COLORS["k"], fontsize=13, weight="bold")
    ax.text(-0.35, -2.3, "V", ha="center", va="center", color=COLORS["v"], fontsize=13, weight="bold")
    ax.text(12.75, 5.35, "O", ha="center", color=COLORS["o"], fontsize=13, weight="bold")
    ax.text(2.46, 5.35, "S and P: never stored", ha="center", color=COLORS["s"], fontsize=11)


def _draw_chip(ax) -> None:
    """What a program keeps for each query row, and what leaves it."""
    look = dict(boxstyle="round,pad=0.1", facecolor="none", edgecolor=COLORS["state"], lw=1.8)
    ax.add_patch(FancyBboxPatch((5.7, 1.0), 5.2, 4.3, **look))
    ax.text(8.3, 4.95, "on chip, for each query row", ha="center", va="center", color=COLORS["state"], fontsize=10)
    for y, name, meaning in (
        (4.1, "m", "largest logit so far"),
        (3.3, r"$\ell$", "sum of exp(s − m)"),
        (2.5, "acc", "sum of exp(s − m) v"),
    ):
        ax.text(5.95, y, name, fontsize=12, weight="bold", va="center")
        ax.text(6.95, y, meaning, fontsize=10, va="center")
    ax.text(5.95, 1.55, r"m grows: $\ell$ and acc $\times$ exp(m$_{old}$ − m)", va="center", fontsize=9)
    ax.annotate("", (12.0, ROW + 0.46), (11.1, ROW + 0.46), arrowprops=dict(arrowstyle="->", lw=1.8))
    ax.text(11.55, ROW + 0.75, r"acc / $\ell$", ha="center", fontsize=9)


if __name__ == "__main__":
    arguments()
    draw()
