"""Line charts as inline SVG. Pure; colours and dashes are CSS classes of the page."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent.markup import Markup, element, join

Points = list[tuple[int, float]]
"""(step, value); a value that is not finite breaks the line."""

WIDTH, HEIGHT = 440, 310
_LEFT, _RIGHT, _TOP, _BASE = 62, WIDTH - 14, 14, HEIGHT - 48


@dataclass(frozen=True)
class Series:
    """One line of a chart."""

    trial: str
    label: str
    style: str
    """CSS class: baseline, full, best1 … or rest."""
    points: Points


@dataclass(frozen=True)
class Zone:
    """Where the policy entropy is healthy, nats per token."""

    low: float
    high: float
    initial: float
    """H0"""
    collapsed: float


@dataclass(frozen=True)
class Chart:
    """One chart: what is drawn and its scales, both of which start at 0."""

    name: str
    title: str
    y_title: str
    caption: str
    series: Sequence[Series]
    x_max: float
    y_max: float
    rungs: Sequence[int] = ()
    ring: tuple[int, float | None] | None = None
    """Step and value of the checkpoint the page is about."""
    zone: Zone | None = None

    def x(self, step: float) -> float:
        """Step → user units."""
        return _LEFT + step / self.x_max * (_RIGHT - _LEFT)

    def y(self, value: float) -> float:
        """Value → user units, cut off just outside the frame."""
        share = min(max(value / self.y_max, -0.04), 1.04)
        return _BASE - share * (_BASE - _TOP)


def draw_figure(chart: Chart) -> Markup:
    """Title, drawing and caption."""
    lines = [_draw_line(chart, series) for series in chart.series]
    drawing = join([*_draw_zone(chart), *_draw_axes(chart), *lines, *_draw_ring(chart)])
    name, box = f"chart-{chart.name}", f"0 0 {WIDTH} {HEIGHT}"
    svg = element("svg", drawing, id=name, viewBox=box, role="img", aria_label=f"{chart.title} per training step")
    return element("figure", join([element("h3", chart.title), svg, element("figcaption", chart.caption)]))


def draw_legend(series: Sequence[Series]) -> Markup:
    """What each line style means; the grey ones share an entry."""
    entries = [(line.style, line.label) for line in reversed(series) if line.style != "rest"]
    grey = sum(line.style == "rest" for line in series)
    if grey:
        entries.append(("rest", f"{grey} other trial{'s' if grey > 1 else ''}"))
    return element("p", join(_draw_legend_entry(*entry) for entry in entries), class_="legend")


def _draw_legend_entry(style: str, label: str) -> Markup:
    line = element("line", class_=f"line {style}", x1=1, y1=6, x2=27, y2=6)
    swatch = element("svg", line, width=28, height=12, viewBox="0 0 28 12", aria_hidden="true")
    return element("span", join([swatch, label]))


def _horizontal(style: str, y: float) -> Markup:
    return element("line", class_=style, x1=_LEFT, y1=y, x2=_RIGHT, y2=y)


def _draw_zone(chart: Chart) -> list[Markup]:
    """The healthy band, H0 and the collapse line."""
    if chart.zone is None:
        return []
    top, low, initial = chart.y(chart.zone.high), chart.y(chart.zone.low), chart.y(chart.zone.initial)
    return [
        element("rect", class_="band", x=_LEFT, y=top, width=_RIGHT - _LEFT, height=low - top),
        _horizontal("h0", initial),
        element("text", "H0", x=_RIGHT - 4, y=initial - 5.0, text_anchor="end"),
        _horizontal("floor", chart.y(chart.zone.collapsed)),
    ]


def _draw_axes(chart: Chart) -> list[Markup]:
    parts = [_horizontal("axis", float(_BASE))]
    for tick in ticks(chart.y_max, 5):
        parts.append(_horizontal("grid", chart.y(tick)))
        parts.append(element("text", f"{tick:g}", x=_LEFT - 7, y=chart.y(tick) + 4.5, text_anchor="end"))
    for tick in ticks(chart.x_max, 6, whole=True):
        parts.append(element("text", f"{tick:g}", x=chart.x(tick), y=_BASE + 18, text_anchor="middle"))
    for x in (chart.x(rung) for rung in chart.rungs if rung <= chart.x_max):
        parts.append(element("line", class_="rung", x1=x, y1=_TOP, x2=x, y2=_BASE))
    across, middle = (_LEFT + _RIGHT) / 2, (_TOP + _BASE) / 2
    turned = {"text_anchor": "middle", "transform": f"rotate(-90 14 {middle:.1f})"}
    parts.append(element("text", "training step", x=across, y=HEIGHT - 8, text_anchor="middle"))
    parts.append(element("text", chart.y_title, x=14, y=middle, **turned))
    return parts


def ticks(maximum: float, count: int, whole: bool = False) -> list[float]:
    """About `count` round values from 0 to the maximum, which is above 0."""
    rough = maximum / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= rough * 0.999)
    step = max(1.0, round(step)) if whole else step
    return [round(i * step, 10) for i in range(int(maximum / step + 1e-6) + 1)]


def _draw_line(chart: Chart, series: Series) -> Markup:
    """Path and dots of one trial: validations get a dot each, other lines one at their end."""
    finite = [(step, value) for step, value in series.points if math.isfinite(value)]
    if not finite:
        return Markup()
    title, style = element("title", series.label), f"line {series.style}"
    path = element("path", title, class_=style, d=_path(chart, series.points), data_trial=series.trial)
    dotted = finite if chart.name == "accuracy" and series.style != "rest" else finite[-1:]
    style = f"dot {series.style}"
    dots = [element("circle", class_=style, cx=chart.x(step), cy=chart.y(value), r=2.6) for step, value in dotted]
    return join([path, *dots])


def _path(chart: Chart, points: Points) -> str:
    """One M or L per finite point; a value that is not finite leaves a gap."""
    commands, command = [], "M"
    for step, value in points:
        if math.isfinite(value):
            commands.append(f"{command}{chart.x(step):.1f} {chart.y(value):.1f}")
        command = "L" if math.isfinite(value) else "M"
    return "".join(commands)


def _draw_ring(chart: Chart) -> list[Markup]:
    step, value = chart.ring or (0, None)
    if value is None:
        return []
    return [element("circle", class_="ring", cx=chart.x(step), cy=chart.y(value), r=7.0)]
