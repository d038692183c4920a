"""HTML pages and tables of a plan and of its check."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from moray.bench.reports.drawing import COLOURS, Plot, legend_below, legend_height, line, shorten
from moray.bench.reports.page import render_page
from moray.bench.reports.svg import render_svg
from moray.bench.reports.wording import number, percent, times

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_WORDS = {True: "yes", False: "no", None: "not checked"}


def write_plan_page(path: Path, result: Mapping[str, Any]) -> None:
    """Tokens per second against depth, one plot for each batch; trees are single points."""
    rows = result["rows"]
    plots = [_by_depth(rows, batch) for batch in dict.fromkeys(row["batch"] for row in rows)]
    page = render_page("moray.bench.plan", "plan.html.jinja", result=result, plots=plots, is_check=False)
    path.write_text(page, encoding="utf-8")


def write_check_page(path: Path, result: Mapping[str, Any]) -> None:
    """Predicted against measured tokens per second."""
    plots = [_predicted_against_measured(result["rows"])]
    page = render_page("moray.bench.plan", "plan.html.jinja", result=result, plots=plots, is_check=True)
    path.write_text(page, encoding="utf-8")


def write_shapes_page(path: Path, result: Mapping[str, Any]) -> None:
    """Time of a draft step against the number of layers."""
    plots = [_step_by_layers(result["rows"], result["fit"])]
    page = render_page("moray.bench.plan", "shapes.html.jinja", result=result, plots=plots)
    path.write_text(page, encoding="utf-8")


def print_shapes(result: Mapping[str, Any], console: Console) -> None:
    """Every shape, the law of depth, and the passes beside it."""
    table = Table(title="a draft step by the drafter's shape", box=box.SIMPLE_HEAD)
    table.add_column("layers x width")
    depths = list(result["rows"][0]["break_even_tau"])
    for heading in (
        "layer parameters",
        "all parameters",
        "ms per token",
        "spread",
        *(f"tau, chain-{depth}" for depth in depths),
    ):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        table.add_row(
            row["name"],
            f"{row['block_parameters'] / 1e6:.2f} M",
            f"{row['parameters'] / 1e6:.2f} M",
            number(1e3 * row["step_seconds"]),
            percent(row["spread"]),
            *(number(row["break_even_tau"][depth]) for depth in depths),
        )
    console.print(table)
    console.print(f"target passes: {_passes(result)}; tau is that at which a chain breaks even", highlight=False)
    console.print(f"by number of layers: {_fit(result['fit'])}", highlight=False)


def _passes(result: Mapping[str, Any]) -> str:
    return ", ".join(f"{size} tokens {number(1e3 * seconds)} ms" for size, seconds in result["passes"].items())


def _fit(fitted: Mapping[str, float]) -> str:
    return (
        f"{number(1e3 * fitted['intercept'])} ms + {number(1e3 * fitted['slope'])} ms for each layer, "
        f"R2 = {number(fitted['r_squared'])}"
    )


def print_plan(result: Mapping[str, Any], console: Console) -> None:
    """The best row of each batch, and of each drafter beside it."""
    table = Table(title="predicted tokens per second", box=box.SIMPLE_HEAD)
    for heading in ("at a time", "drafter", "tree", "tok/s", "over plain", "tau", "tau to break even", "drafting"):
        table.add_column(heading, justify="left" if heading in ("drafter", "tree") else "right")
    for batch in dict.fromkeys(row["batch"] for row in result["rows"]):
        own = [row for row in result["rows"] if row["batch"] == batch]
        plain = next(row for row in own if not row["depth"])
        for name in dict.fromkeys(row["drafter"] for row in own):
            best = max((row for row in own if row["drafter"] == name), key=lambda row: row["tokens_per_second"])
            table.add_row(
                str(batch),
                name,
                best["tree"],
                number(best["tokens_per_second"]),
                times(best["tokens_per_second"] / plain["tokens_per_second"]),
                number(best["tau"]),
                number(best["break_even_tau"]),
                percent(best["draft_share"]),
            )
    console.print(table)


def print_check(result: Mapping[str, Any], console: Console) -> None:
    """Every row, and the summary."""
    table = Table(title="predicted and measured", box=box.SIMPLE_HEAD)
    for heading in (
        "at a time",
        "drafter",
        "tree",
        "predicted tok/s",
        "measured",
        "error",
        "slowdown",
        "adjusted error",
        "spread",
        "tau",
        "equal texts",
    ):
        table.add_column(heading, justify="left" if heading in ("drafter", "tree") else "right")
    for row in result["rows"]:
        table.add_row(
            str(row["batch"]),
            row["drafter"],
            row["tree"],
            number(row["tokens_per_second"]),
            number(row["measured_tokens_per_second"]),
            f"{row['error']:+.1%}",
            number(row["slowdown"]),
            f"{row['adjusted_error']:+.1%}",
            f"{row['spread']:.1%}",
            number(row["measured_tau"]),
            _WORDS[row["lossless"]],
        )
    console.print(table)
    low, high = result["slowdown"]
    console.print(f"error: median {result['median_error']:.1%}, worst {result['worst_error']:.1%}")
    console.print(
        f"plain cycles beside the rows took {low:.2f} to {high:.2f} times as long as in the costs (slowdown); adjusted "
        f"for that, the error of rows with drafts is {result['median_adjusted_error']:.1%} in the median, at most "
        f"{result['worst_adjusted_error']:.1%}"
    )
    if result["has_drifted"]:
        console.print(
            "warning: the machine has changed its speed since the costs were measured "
            f"({result['median_slowdown']:.2f} times as long in the median): this check says little, so measure the "
            "costs again and repeat it"
        )
    for each in result["choices"]:
        console.print(
            f"{each['batch']} at a time: predicted best of these {each['chosen']}, measured {each['fastest']}, "
            f"which is {each['regret']:.1%} faster; {each['same_order']:.0%} of the pairs are in the right order"
        )


def _by_depth(rows: Sequence[Mapping[str, Any]], batch: int) -> Plot:
    own = [row for row in rows if row["batch"] == batch]
    plain = next(row["tokens_per_second"] for row in own if not row["depth"])
    curves: dict[str, list[tuple[int, float]]] = {}
    for row in own:
        if row["depth"]:
            name = row["drafter"] if row["is_chain"] else row["name"]
            curves.setdefault(name, []).append((row["depth"], row["tokens_per_second"]))
    title = f"Tokens per second by depth, {batch} at a time"
    said = [f"plain decoding {plain:.1f}"]
    for name, points in curves.items():
        first, last = points[0][1], points[-1][1]
        said.append(f"{name} {first:.1f}" if len(points) == 1 else f"{name} from {first:.1f} to {last:.1f}")
    svg = render_svg(f"batch-{batch}", _curves(curves, plain), 2.6 + legend_height(["plain", *curves]))
    return Plot(f"batch-{batch}", title, f"{title}: {'; '.join(said)}.", svg)


def _curves(curves: Mapping[str, Sequence[tuple[int, float]]], plain: float) -> Callable[["Figure"], None]:
    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        handles = {"plain": axes.axhline(plain, color=COLOURS[-1], linestyle=":")}
        for index, (name, points) in enumerate(curves.items()):
            depths, speeds = zip(*points, strict=True)
            handles[shorten(name)] = axes.plot(depths, speeds, **line(index))[0]
        axes.set_xlabel("levels drafted")
        axes.set_ylim(bottom=0)
        legend_below(figure, handles)

    return draw


def _step_by_layers(rows: Sequence[Mapping[str, Any]], fitted: Mapping[str, float]) -> Plot:
    layers = [row["num_layers"] for row in rows]
    milliseconds = [1e3 * row["step_seconds"] for row in rows]

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        ends = [0, max(layers)]
        heights = [1e3 * (fitted["intercept"] + fitted["slope"] * end) for end in ends]
        axes.plot(ends, heights, color=COLOURS[-1], linestyle=":")
        axes.plot(layers, milliseconds, "o", color=COLOURS[0])
        axes.set_xlabel("decoder layers, at equal parameters")
        axes.set_ylabel("ms per drafted token")
        axes.set_ylim(bottom=0)

    title = "Time of a draft step by depth"
    said = "; ".join(f"{row['name']} {1e3 * row['step_seconds']:.2f} ms" for row in rows)
    return Plot("shapes", title, f"{title}: {said}. {_fit(fitted)}.", render_svg("shapes", draw, 3))


def _predicted_against_measured(rows: Sequence[Mapping[str, Any]]) -> Plot:
    points = [(row["measured_tokens_per_second"], row["tokens_per_second"]) for row in rows]
    most = 1.1 * max(max(point) for point in points)

    def draw(figure: "Figure") -> None:
        axes = figure.subplots()
        axes.plot([0, most], [0, most], color=COLOURS[-1], linestyle=":")
        axes.plot([x for x, _ in points], [y for _, y in points], "o", color=COLOURS[0])
        axes.set_xlabel("measured tokens per second")
        axes.set_ylabel("predicted")
        axes.set_xlim(0, most)
        axes.set_ylim(0, most)

    title = "Predicted against measured tokens per second"
    worst = max(abs(row["error"]) for row in rows)
    return Plot(
        "check", title, f"{title}, {len(rows)} rows; the worst is {worst:.1%} off.", render_svg("check", draw, 3)
    )
