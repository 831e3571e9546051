"""Sets how our pictures and pages look. An SVG changes to dark colours on a dark page. People of
any colour vision can tell the curves' colours apart (Okabe and Ito's), and each has a dash pattern
of its own, for print."""

import io
import re

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

THEME = {"paper": ("#ffffff", "#0f1419"), "ink": ("#1f2328", "#e6edf3"), # light, dark
         "quiet": ("#59636e", "#9aa7b4"), "grid": ("#e3e6ea", "#2a323b")}
PAPER, INK, QUIET, GRID = (light for light, _ in THEME.values())
LINES = ["#0072b2", "#d55e00", "#009e73", "#b5568f", "#8a6d00", "#3a3a3a"]
DARK = {**dict(THEME.values()), **dict(zip(
    LINES, ["#56b4e9", "#ff9550", "#2cc79b", "#e39bc6", "#f0e442", "#d0d7de"]))}
DASHES = ["-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)), "-"]
SETTINGS = {
    "font.family": "DejaVu Sans", "font.size": 9.5, "text.color": INK,
    "figure.facecolor": PAPER, "axes.facecolor": PAPER, "axes.edgecolor": QUIET,
    "axes.labelcolor": INK, "axes.titlesize": 10.5, "axes.titleweight": "bold",
    "axes.titlelocation": "left", "axes.spines.top": False, "axes.spines.right": False,
    "axes.linewidth": 0.8, "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7,
    "axes.axisbelow": True, "axes.xmargin": 0.01, "xtick.color": QUIET, "ytick.color": QUIET,
    "legend.frameon": False, "lines.linewidth": 1.6, "lines.solid_capstyle": "round",
    "agg.path.chunksize": 10000, # points at once: too many at once are an error
    "svg.hashsalt": "llm8.c", "svg.fonttype": "none", # so that the file's bytes are always the same
}
LEGEND_LETTERS = 120 # the most letters in a row of a legend


def color(index):
    return LINES[index % len(LINES)]


def line(index):
    """Returns colour and dashes of the index-th curve."""
    return {"color": color(index), "linestyle": DASHES[index % len(DASHES)]}


def draw(function, size, *arguments, form="svg"):
    """Returns the SVG or PNG that function(figure, *arguments) draws. size: in inches."""
    out = io.BytesIO()
    with matplotlib.rc_context(matplotlib.rcParamsDefault | SETTINGS): # and not a user's file
        figure = Figure(figsize=size, dpi=150, layout="constrained")
        function(figure, *arguments)
        figure.savefig(out, format=form, metadata={"Date": None, "Creator": None} if form == "svg"
                       else {"Software": None})
    if form != "svg":
        return out.getvalue()
    rules = "".join(f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
                    for what in ("fill", "stroke") for light, dark in DARK.items())
    dark = f"@media (prefers-color-scheme: dark){{{rules}}}</style>".encode()
    # the numbers of paths are cut to hundredths; matplotlib writes millionths
    drawn = re.sub(rb' d="[^"]*"', lambda path: re.sub(rb"(\.\d\d)\d+", rb"\1", path[0]),
                   out.getvalue())
    return drawn.replace(b"</style>", dark, 1)


def legend_above(axes, *others):
    """Puts the legend, of the other axes' labels too, between title and axes, over no line."""
    known = {}
    for one in (axes, *others):
        for handle, label in zip(*one.get_legend_handles_labels()):
            known.setdefault(label, handle)
    if not known:
        return
    labels, handles = list(known), list(known.values())
    columns = max(1, min(len(labels), LEGEND_LETTERS // (max(map(len, labels)) + 9)))
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns,
                borderaxespad=0.2, handlelength=2.8, columnspacing=1.6, fontsize=9)
    axes.set_title(axes.get_title(loc="left"), pad=6 + 16 * -(-len(handles) // columns))


def short(value):
    """Returns a number as "850k" or "1.2M". Ticks may be close together and far from 0."""
    if abs(value) >= 1e12:
        return f"{value:g}"
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


def written(axis, how=short):
    """Sets the function that writes the values of an axis's ticks."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: how(value)))


def step_axis(axis):
    """Sets ticks for steps, which are whole numbers."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    written(axis, "{:,.0f}".format)


def log_axis(axis):
    """Sets ticks at decades, and between them if they are few. Ticks are plain numbers."""
    axis.axes.set_yscale("log")
    low, high = axis.get_view_interval()
    axis.set_major_locator(MaxNLocator(6) if high < 3 * low else
                           LogLocator(10, (1, 2, 5) if high < 1e4 * low else (1,)))
    axis.set_minor_locator(NullLocator())
    written(axis)
