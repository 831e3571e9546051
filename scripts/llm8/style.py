"""How our pictures look: one theme for light pages and one for dark, colours that people with any
colour vision can tell apart (Okabe and Ito's), and a dash pattern with each, for print."""

import io

import matplotlib
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

THEMES = {
    "light": {"paper": "#ffffff", "ink": "#1f2328", "quiet": "#59636e", "grid": "#e3e6ea",
              "lines": ["#0072b2", "#d55e00", "#009e73", "#b5568f", "#8a6d00", "#3a3a3a"]},
    "dark": {"paper": "#0f1419", "ink": "#e6edf3", "quiet": "#9aa7b4", "grid": "#2a323b",
             "lines": ["#56b4e9", "#ff9550", "#2cc79b", "#e39bc6", "#f0e442", "#d0d7de"]},
}
DASHES = ["-", (0, (5, 1.6)), (0, (1.4, 1.2)), (0, (6, 1.5, 1.2, 1.5)), (0, (9, 2)), "-"]
DOTS_PER_INCH = 150
LEGEND_LETTERS = 120 # in a row of a legend


class Theme:
    def __init__(self, name):
        self.name = name
        self.__dict__.update(THEMES[name])

    def line(self, index):
        """Colour and dashes of the index-th curve."""
        return {"color": self.lines[index % len(self.lines)],
                "linestyle": DASHES[index % len(DASHES)]}

    def color(self, index):
        return self.lines[index % len(self.lines)]

    def color_of(self, kind):
        """The same in every picture: "bf16", "fp8", "muon", and of what is not ours."""
        kinds = ("bf16", "fp8", "muon")
        return self.color(kinds.index(kind)) if kind in kinds else self.quiet

    def settings(self):
        return {
            "font.family": "DejaVu Sans", "font.size": 9.5, "text.color": self.ink,
            "figure.facecolor": self.paper, "axes.facecolor": self.paper,
            "axes.edgecolor": self.quiet, "axes.labelcolor": self.ink,
            "axes.titlesize": 10.5, "axes.titleweight": "bold", "axes.titlelocation": "left",
            "axes.spines.top": False, "axes.spines.right": False, "axes.linewidth": 0.8,
            "axes.grid": True, "grid.color": self.grid, "grid.linewidth": 0.7,
            "axes.axisbelow": True, "axes.xmargin": 0.01,
            "xtick.color": self.quiet, "ytick.color": self.quiet,
            "legend.frameon": False, "lines.linewidth": 1.6, "lines.solid_capstyle": "round",
        }


def draw(function, theme_name, size, *arguments):
    """function(figure, theme, *arguments) as the bytes of a PNG; size in inches."""
    theme = Theme(theme_name)
    with matplotlib.rc_context(theme.settings()):
        figure = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
        canvas = FigureCanvasAgg(figure)
        function(figure, theme, *arguments)
        canvas.draw() # savefig would do it twice
        out = io.BytesIO()
        # without the library's version in it, the same runs give the same bytes
        imsave(out, canvas.buffer_rgba(), format="png", dpi=DOTS_PER_INCH,
               metadata={"Software": None})
    return out.getvalue()


def flat(colors):
    return [color for value in colors.values()
            for color in (value if isinstance(value, list) else [value])]


def draw_svg(function, size, *arguments, **settings):
    """function(figure, theme, *arguments) as SVG, the same bytes each time, which takes the dark
    theme's colours on a dark page; settings: other than the theme's."""
    theme, out = Theme("light"), io.StringIO()
    with matplotlib.rc_context({**theme.settings(), "svg.hashsalt": "llm8.c",
                                "svg.fonttype": "none", **settings}):
        figure = Figure(figsize=size, layout="constrained")
        function(figure, theme, *arguments)
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    rules = [f'[style*="{what}: {light}"]{{{what}:{dark} !important}}' for what in
             ("fill", "stroke") for light, dark in zip(*map(flat, THEMES.values()))]
    dark = "@media (prefers-color-scheme: dark){" + "".join(rules) + "}</style>"
    return out.getvalue().replace("</style>", dark, 1)


def draw_both(function, size, *arguments):
    """For light pages and for dark ones."""
    return [draw(function, theme, size, *arguments) for theme in THEMES]


def legend_above(axes):
    """Between the title and the axes: never over a line."""
    handles, labels = axes.get_legend_handles_labels()
    if not handles:
        return
    columns = max(1, min(len(labels), LEGEND_LETTERS // (max(map(len, labels)) + 9)))
    axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns,
                borderaxespad=0.2, handlelength=2.8, columnspacing=1.6, fontsize=9)
    axes.set_title(axes.get_title(loc="left"), pad=6 + 16 * -(-len(handles) // columns))


def percent_axis(axis):
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.3g}%" if value else "0"))


def short(value):
    """850k, 1.2M: for axes, whose ticks may be close to each other and far from 0."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:.6g}{letter}"
    return f"{value:.6g}"


def short_axis(axis):
    axis.set_major_formatter(FuncFormatter(lambda value, _: short(value)))


def step_axis(axis):
    """Steps are whole numbers."""
    axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def log_axis(axis):
    """Decades, and 2 and 5 between, as plain numbers."""
    axis.axes.set_yscale("log")
    axis.set_major_locator(LogLocator(10, (1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    short_axis(axis)
