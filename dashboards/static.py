"""A line figure of `dashboards/figures` as an SVG file's text, drawn by matplotlib: for pages that show it without Plotly's script.

Draws what such figures have: lines, markers or both, ranges, horizontal lines, axis titles, a log axis with its ticks, the legend. Nothing else.
"""

from __future__ import annotations

import io
from typing import Any

import matplotlib
import plotly.graph_objects as go
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from dashboards.figures.style import GRID

INCHES = (8.0, 4.4)
MARKERS = {"circle": "o", "square": "s", "diamond": "D", "cross": "P", "star": "*", "triangle-up": "^"}
DASHES = {"solid": "-", "dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 3)), "longdashdot": (0, (8, 3, 1, 3))}
# text stays text, and the same figure is the same file
SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "figure", "font.family": "sans-serif", "font.size": 10, "axes.spines.top": False}


def svg(figure: go.Figure) -> str:
    with matplotlib.rc_context(SETTINGS | {"axes.spines.right": False}):
        drawn = Figure(figsize=INCHES, layout="constrained")
        axes = drawn.add_subplot()
        for trace in figure.data:
            _line(axes, trace)
        for shape in figure.layout.shapes:
            axes.axhline(shape.y0, color=shape.line.color, linewidth=shape.line.width, linestyle=DASHES[shape.line.dash])
        for note in figure.layout.annotations:
            below = {"xytext": (0, -8), "textcoords": "offset points", "ha": "right", "va": "top"}
            axes.annotate(note.text, (1.0, note.y), xycoords=("axes fraction", "data"), fontsize=8, color="#5f5f5f", **below)
        _axes(axes, figure.layout)
        axes.legend(title=figure.layout.legend.title.text, frameon=False, bbox_to_anchor=(1.01, 1.0), loc="upper left")
        text = io.StringIO()
        FigureCanvasSVG(drawn).print_svg(text, metadata={"Date": None, "Creator": None})
    return "\n".join(line.rstrip() for line in text.getvalue().splitlines()) + "\n"


def _line(axes: Any, trace: go.Scatter) -> None:
    style: dict[str, Any] = {"linestyle": "none", "color": trace.line.color or trace.marker.color}
    if "lines" in trace.mode:
        style |= {"linestyle": DASHES[trace.line.dash]}
    if "markers" in trace.mode:
        symbol = trace.marker.symbol
        style |= {"marker": MARKERS[symbol.partition("-open")[0].removesuffix("-dot")], "markersize": 6}
        style |= {"markerfacecolor": "white"} if "-open" in symbol else {}
    ranges = None if trace.error_y.array is None else [trace.error_y.arrayminus, trace.error_y.array]
    axes.errorbar(trace.x, trace.y, yerr=ranges, label=trace.name, capsize=3, **style)


def _axes(axes: Any, layout: go.Layout) -> None:
    axes.set_xlabel(layout.xaxis.title.text)
    axes.set_ylabel(layout.yaxis.title.text)
    axes.grid(color=GRID)
    axes.set_axisbelow(True)
    if layout.xaxis.type == "log":
        axes.set_xscale("log")
        axes.minorticks_off()
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))  # a decade alone would have one tick
        axes.xaxis.set_major_formatter(EngFormatter(sep=" "))
    if layout.xaxis.tickvals is not None:
        axes.set_xticks(layout.xaxis.tickvals, layout.xaxis.ticktext)
    if layout.yaxis.rangemode == "tozero":
        axes.set_ylim(0, 1.05 * axes.get_ylim()[1])  # the highest marker whole
