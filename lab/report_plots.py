"""Plots of replays, drawn with matplotlib (the extra `lab`): as SVG for the report, and as PNG.

Text and axes of the SVGs take the colour of the page around them, so one picture serves light and
dark pages alike.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from PIL import Image

from lab.replay_metrics import Metrics
from lab.replay_result import Floats, Result

matplotlib.use("Agg")

_INK = "#123457"  # stands for the page's text colour until the SVG is written
_COLOURS = (
    *("#d62728", "#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#17becf", "#8c564b", "#e377c2"),
    *("#7f7f7f", "#bcbd22", "#5254a3", "#637939", "#8c6d31", "#843c39", "#7b4173", "#3182bd"),
)
_STYLE: Any = {
    "font.size": 9,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "svg.fonttype": "none",
    "svg.hashsalt": "multiplane",
    "legend.frameon": False,
    "lines.linewidth": 1.4,
}
_OURS = "multiplicative"
_PNG_COLOURS = 96


def colours(policies: Sequence[str]) -> dict[str, str]:
    """Return a colour for each policy; the plane's default is always the first."""
    ordered = sorted(dict.fromkeys(policies), key=lambda name: name != _OURS)
    return {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(ordered)}


def cdfs(results: Sequence[Result]) -> Figure:
    """Draw the distributions of TTFT and TPOT, a line a policy, up to the 99.9th percentile."""
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _figure(9.0, 3.4, 2)
        paint = colours([result.policy for result in results])
        for result in results:
            style = _line(result.policy, paint)
            _cdf(left, result.ttft_s, style)
            _cdf(right, result.tpot_s * 1e3, style)
        left.set(xscale="log", xlabel="TTFT, s", ylabel="share of requests")
        right.set(xscale="log", xlabel="TPOT, ms")
        _legend(right, len(results))
    return figure


def against_load(sweep: Sequence[Sequence[Metrics]]) -> Figure:
    """Draw latencies and hits against the load, a line a policy, means over seeds.

    Args:
        sweep: the rows of each load.
    """
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(9.0, 6.2, 2, 2)
        paint = colours([row.policy for rows in sweep for row in rows])
        panels: tuple[tuple[str, Callable[[Metrics], float], str], ...] = (
            ("TTFT mean, s", lambda row: row.ttft_s[0], "log"),
            ("TTFT p99, s", lambda row: row.ttft_s[3], "log"),
            ("TPOT p99, ms", lambda row: row.tpot_s[3] * 1e3, "log"),
            ("hit rate", lambda row: row.hit_rate, "linear"),
        )
        loads = [float(np.mean([row.offered_rps for row in rows])) for rows in sweep]
        for axis, (label, value, scale) in zip(axes, panels, strict=True):
            for policy in paint:
                means = [
                    float(np.mean([value(row) for row in rows if row.policy == policy] or [np.nan]))
                    for rows in sweep
                ]
                axis.plot(loads, means, marker="o", markersize=3, **_line(policy, paint))
            axis.set(xlabel="requests/s offered", ylabel=label, yscale=scale)
            if scale == "log":
                _plain_ticks(axis)
        _legend(axes[0], len(paint))
    return figure


def balance(results: Sequence[Result]) -> Figure:
    """Draw every instance's batch over time, a picture a policy, all on one scale."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(9.0, 0.5 + 1.15 * len(results), 1, len(results), shared=True)
        most = max(float(np.percentile(result.batch, 99.5)) for result in results) or 1.0
        for axis, result in zip(axes, results, strict=True):
            extent = (0.0, float(result.sample_s[-1]), -0.5, result.batch.shape[1] - 0.5)
            picture = axis.imshow(
                result.batch.T,
                aspect="auto",
                origin="lower",
                extent=extent,
                vmin=0.0,
                vmax=most,
                cmap="magma",
                interpolation="nearest",
            )
            axis.set_ylabel("instance")
            axis.set_title(result.policy, fontsize=9, loc="left", color=_INK)
            axis.grid(visible=False)
        axes[-1].set_xlabel("time, s")
        figure.colorbar(picture, ax=list(axes), label="requests", shrink=0.8)
    return figure


def decisions(results: Sequence[Result]) -> Figure:
    """Draw every decision: when, who got it, and how much of the prompt was cached there."""
    with matplotlib.rc_context(_STYLE):
        figure, axes = _figure(9.0, 0.5 + 1.15 * len(results), 1, len(results), shared=True)
        for axis, result in zip(axes, results, strict=True):
            share = result.cached_tokens / np.maximum(result.prompt_tokens, 1)
            shift = (np.arange(len(share)) * 0.618) % 1.0 * 0.7 - 0.35
            points = axis.scatter(
                result.at_s,
                result.instance + shift,
                c=share,
                s=3,
                linewidths=0,
                cmap="viridis",
                vmin=0.0,
                vmax=1.0,
                rasterized=True,
            )
            axis.set_ylabel("instance")
            axis.set_title(result.policy, fontsize=9, loc="left", color=_INK)
        axes[-1].set_xlabel("arrival, s")
        figure.colorbar(points, ax=list(axes), label="share of the prompt cached", shrink=0.8)
    return figure


def queues(results: Sequence[Result]) -> Figure:
    """Draw the largest batch over the mean one, and all requests in the fleet, over time."""
    with matplotlib.rc_context(_STYLE):
        figure, (left, right) = _figure(9.0, 3.2, 2)
        paint = colours([result.policy for result in results])
        for result in results:
            style = _line(result.policy, paint)
            total = result.batch.sum(axis=1)
            mean = np.maximum(total / result.batch.shape[1], 1.0)
            left.plot(result.sample_s, _smooth(result.batch.max(axis=1) / mean), **style)
            right.plot(result.sample_s, total, **style)
        left.set(xlabel="time, s", ylabel="largest batch / mean batch")
        right.set(xlabel="time, s", ylabel="requests in the fleet")
        _legend(right, len(results))
    return figure


def png(figure: Figure) -> bytes:
    """Return a figure as a picture for a white page, in few colours: a fourth of the bytes."""
    drawn, stream = io.BytesIO(), io.BytesIO()
    figure.savefig(drawn, format="png", dpi=110, facecolor="white")
    with Image.open(drawn) as picture:
        picture.convert("RGB").quantize(_PNG_COLOURS).save(stream, format="png", optimize=True)
    return stream.getvalue()


def svg(figure: Figure) -> str:
    """Return a figure as an SVG element that takes the colour of the text around it."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue()
    text = text[text.index("<svg") :].replace(_INK, "currentColor")
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    return re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", text, count=1)


def _figure(
    width: float, height: float, columns: int, rows: int = 1, *, shared: bool = False
) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, sharex=shared, squeeze=False)
    return figure, list(axes.ravel())


def _line(policy: str, paint: Mapping[str, str]) -> dict[str, Any]:
    ours = policy == _OURS
    return {
        "label": policy,
        "color": paint[policy],
        "linewidth": 2.4 if ours else 1.2,
        "zorder": 3 if ours else 2,
    }


def _plain_ticks(axis: Axes) -> None:
    """Write 0.5 and 20 at a logarithmic axis, and only as many as there is room for."""
    ticks = LogLocator(subs=(1.0, 2.0, 5.0))
    axis.yaxis.set_major_locator(ticks)
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _legend(axis: Axes, entries: int) -> None:
    if axis.has_data():
        axis.legend(fontsize=7 if entries > 6 else 8, ncols=2 if entries > 8 else 1)


def _cdf(axis: Axes, values: Floats, style: dict[str, Any]) -> None:
    values = np.sort(values[np.isfinite(values)])
    if not len(values):
        return
    shares = np.linspace(0.0, 0.999, 400)
    axis.plot(np.maximum(np.quantile(values, shares), 1e-4), shares, **style)


def _smooth(values: Floats, width: int = 15) -> Floats:
    """Return running means."""
    width = min(width, len(values))
    padded = np.pad(values, (width // 2, width - 1 - width // 2), mode="edge")
    return np.convolve(padded, np.ones(width) / width, mode="valid")
