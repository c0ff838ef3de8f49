"""A picture of a training run: loss, and acceptance at each position, over tokens in log scale.

Logarithmic, because each doubling of the data buys about the same: a line that still rises at its right end says that
more data would help. Owns the drawing. Refuses to run without matplotlib, which is in the extra `train`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Entry = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Points of one line; `num_tokens` is ascending and positive."""

    label: str
    num_tokens: tuple[int, ...]
    values: tuple[float, ...]


def loss_curves(entries: Sequence[Entry]) -> list[Curve]:
    """One line for each kind of loss, such as `loss` and `held_out_loss`."""
    kinds = sorted({key for entry in entries for key in entry if key.endswith("loss")})
    return [_curve(kind.replace("_", " "), [(entry, entry.get(kind)) for entry in entries]) for kind in kinds]


def acceptance_curves(entries: Sequence[Entry]) -> list[Curve]:
    """One line for each position, from entries with `acceptance` (a list, first position first)."""
    measured = [(entry, entry["acceptance"]) for entry in entries if entry.get("acceptance") is not None]
    num_positions = max((len(rates) for _, rates in measured), default=0)
    return [
        _curve(
            f"position {position + 1}",
            [(entry, rates[position] if position < len(rates) else None) for entry, rates in measured],
        )
        for position in range(num_positions)
    ]


def plot_training(entries: Sequence[Entry], path: Path) -> Path:
    """Draw entries of a metrics log (those with `num_tokens`) as a PNG; returns its path.

    Raises:
        ConfigError: matplotlib is missing, or there is nothing to draw.
    """
    losses, acceptances = loss_curves(entries), acceptance_curves(entries)
    if not any(curve.values for curve in (*losses, *acceptances)):
        raise ConfigError("there is nothing to plot yet: the metrics have no losses and no acceptance rates")
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("plots need matplotlib, which is in the extra `train`: pip install 'peagle[train]'") from None
    figure = Figure(figsize=(7.0, 8.0), layout="constrained")
    FigureCanvasAgg(figure)  # no window, whatever the user's settings of matplotlib are
    top, bottom = figure.subplots(2, 1)
    _draw(top, losses, "loss")
    _draw(bottom, acceptances, "acceptance, if the earlier drafts were accepted")
    figure.savefig(path, dpi=120, format="png")
    return path


def _curve(label: str, points: Sequence[tuple[Entry, float | None]]) -> Curve:
    known = [(entry["num_tokens"], value) for entry, value in points if value is not None and entry.get("num_tokens")]
    return Curve(label=label, num_tokens=tuple(num for num, _ in known), values=tuple(value for _, value in known))


def _draw(axes: Axes, curves: Sequence[Curve], title: str) -> None:
    axes.set_title(title)
    axes.set_xlabel("response tokens")
    axes.grid(visible=True, alpha=0.3)
    drawn = [curve for curve in curves if curve.values]
    if not drawn:
        return
    axes.set_xscale("log")
    for curve in drawn:
        axes.plot(curve.num_tokens, curve.values, label=curve.label, marker="." if len(curve.values) < 30 else "")
    axes.legend(fontsize="small")
