"""One picture and one table of a finished run.

A reader wants four answers: did the loss fall, did the student get closer to the teacher on
text it never saw, what did waiting for the teacher cost, and what travelled. The figure has
one panel for each; the table has the numbers. What a run did not measure is said to be
missing, never drawn as zero.

Reads two things that the trainer writes anyway:

    report   one flat mapping, the keys of `report.json`. Optional besides the table's:
             codec (str), bytes_per_token_by_codec ({codec: bytes})
    history  transformers' `state.log_history`: mappings with step and any of kd_loss,
             ce_loss, step_s, teacher_wait_s, forward_backward_s, eval_kl

Depends on: matplotlib (Agg, no display), rich. Knows nothing of torch or the trainer.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator
from rich.console import Console
from rich.table import Table

Entry = Mapping[str, object]

BLUE, ORANGE, GREEN, GREY = "#2f6db5", "#d9772b", "#3b8f5a", "#b4bac2"
INK, FAINT = "#22272e", "#e6e9ed"

FIGURES = (
    ("world_size", "student ranks", "{:,.0f}"),
    ("parallelism", "parallelism", "{}"),
    ("transport", "transport", "{}"),
    ("steps", "optimizer steps", "{:,.0f}"),
    ("supervised_tokens", "supervised tokens", "{:,.0f}"),
    ("eval_kl_before", "held-out KL before", "{:.3f} nats"),
    ("eval_kl_after", "held-out KL after", "{:.3f} nats"),
    ("eval_ce_before", "held-out CE before", "{:.3f} nats"),
    ("eval_ce_after", "held-out CE after", "{:.3f} nats"),
    ("eval_top1_agreement_before", "top-1 agreement before", "{:.1%}"),
    ("eval_top1_agreement_after", "top-1 agreement after", "{:.1%}"),
    ("bytes_per_token", "bytes a supervised token", "{:,.1f} B"),
    ("dense_bytes_per_token", "the same as full logits", "{:,.0f} B"),
    ("teacher_wait_fraction", "step time spent waiting", "{:.1%}"),
    ("train_tokens_per_s", "tokens trained", "{:,.0f} tokens/s"),
    ("peak_rank_rss_gib", "peak memory of a rank", "{:.2f} GiB"),
    ("remote_vs_local_loss_abs_diff", "first loss, remote - local", "{:.1e}"),
)
"""Keys of the report in reading order, with their words and formats."""


def print_report_table(report: Mapping[str, object], *, console: Console | None = None) -> None:
    """Print the main figures of a report as two aligned columns.

    Args:
        report: the keys of `FIGURES`; a missing one prints as "not measured".
        console: where to print; None is the terminal.
    """
    table = Table(title="Distillation report", show_header=False, title_justify="left")
    table.add_column("figure")
    table.add_column("value", justify="right")
    for key, words, form in FIGURES:
        value = report.get(key)
        table.add_row(words, "not measured" if value is None else form.format(value))
    (console or Console()).print(table)


def write_report(report: Mapping[str, object], history: Sequence[Entry], path_png: Path) -> None:
    """Draw the run as one PNG of 1600 x 1000 pixels.

    Args:
        report: the figures of `report.json`; any may be missing.
        history: log entries in the order of their steps; any key may be missing.
        path_png: the file to write; its folder is created.
    """
    # A Figure of our own, not pyplot: no global state, no display, nothing to close.
    figure = Figure(figsize=(16, 10), dpi=100)
    FigureCanvasAgg(figure)
    figure.subplots_adjust(left=0.06, right=0.97, bottom=0.07, top=0.86, wspace=0.18, hspace=0.36)
    figure.suptitle(describe_run(report), fontsize=17, color=INK, x=0.02, y=0.965, ha="left")
    losses, held_out, time, wire = figure.subplots(2, 2).flat
    draw_losses(losses, history)
    draw_held_out(held_out, report, history)
    draw_time(time, report, history)
    draw_wire(wire, report)
    path_png.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path_png, facecolor="white")


def describe_run(report: Mapping[str, object]) -> str:
    """Say the run in one line, as far as it is known."""
    words = (
        ("steps", "{:,} steps"),
        ("supervised_tokens", "{:,} supervised tokens"),
        ("world_size", "{} ranks"),
        ("parallelism", "{}"),
        ("transport", "teacher over {}"),
    )
    known = [form.format(report[key]) for key, form in words if report.get(key) is not None]
    return "   ·   ".join(["Distillation run", *known])


def draw_losses(axes: Axes, history: Sequence[Entry]) -> None:
    """Draw every loss part that was logged, over the optimizer steps."""
    label_axes(axes, "Training loss", "optimizer step", "nats a token")
    parts = (
        ("kd_loss", "forward KL to the teacher", BLUE),
        ("ce_loss", "cross-entropy to the text", ORANGE),
    )
    for key, words, colour in parts:
        steps, values = read_series(history, key)
        if values:
            axes.plot(steps, values, color=colour, linewidth=2, label=words)
    finish(axes, is_drawn=bool(axes.lines), needs="kd_loss or ce_loss")


def draw_held_out(axes: Axes, report: Mapping[str, object], history: Sequence[Entry]) -> None:
    """Draw the held-out KL: before, whenever it was evaluated, and after."""
    label_axes(axes, "Held-out text", "optimizer step", "KL(teacher || student), nats a token")
    points = dict(zip(*read_series(history, "eval_kl"), strict=True))
    last = max([*points, *read_series(history, "kd_loss")[0], 1.0])
    ends = ((0.0, "eval_kl_before"), (read_number(report, "steps") or last, "eval_kl_after"))
    for step, key in ends:
        value = read_number(report, key)
        if value is not None:
            points[step] = value
    steps = sorted(points)
    values = [points[step] for step in steps]
    axes.plot(steps, values, color=BLUE, linewidth=2, marker="o", markersize=8, clip_on=False)
    for step, value in {(s, points[s]) for s in (steps[:1] + steps[-1:])}:
        axes.annotate(
            f"{value:.2f}", (step, value), (0, 12), textcoords="offset points", ha="center"
        )
    before = read_number(report, "eval_top1_agreement_before")
    after = read_number(report, "eval_top1_agreement_after")
    if before is not None and after is not None:
        note = f"same first choice as the teacher: {before:.0%} before, {after:.0%} after"
        axes.text(0.98, 0.95, note, transform=axes.transAxes, ha="right", va="top", color=INK)
    finish(axes, is_drawn=bool(points), needs="eval_kl_before and eval_kl_after")


def draw_time(axes: Axes, report: Mapping[str, object], history: Sequence[Entry]) -> None:
    """Draw what each step's seconds went to, as stacked bars."""
    label_axes(axes, "Where a step's time goes", "optimizer step", "seconds")
    timed = [e for e in history if read_number(e, "step_s") is not None]
    steps = [read_number(e, "step") or 0.0 for e in timed]
    waits = [read_number(e, "teacher_wait_s") or 0.0 for e in timed]
    works = [read_number(e, "forward_backward_s") for e in timed]
    totals = [read_number(e, "step_s") or 0.0 for e in timed]
    is_split = all(work is not None for work in works)
    forwards = [work or 0.0 for work in works] if is_split else [0.0] * len(timed)
    others = [max(0.0, t - w - f) for t, w, f in zip(totals, waits, forwards, strict=True)]
    # Bars touch when steps are logged one by one and stay visible when they are not.
    width = 0.85 * min((b - a for a, b in pairwise(steps) if b > a), default=1)
    rest = "optimizer, data, other" if is_split else "student and all else"
    bottoms = [0.0] * len(timed)
    layers = (
        (waits, ORANGE, "waiting for the teacher"),
        (forwards, BLUE, "forward and backward"),
        (others, GREY, rest),
    )
    for heights, colour, words in layers if timed else ():
        if any(heights) or colour == ORANGE:
            axes.bar(steps, heights, width, bottoms, color=colour, label=words)
        bottoms = [b + h for b, h in zip(bottoms, heights, strict=True)]
    fraction = read_number(report, "teacher_wait_fraction")
    if fraction is not None:
        axes.set_title(f"{fraction:.1%} of the time is waiting", loc="right", fontsize=11, pad=12)
    finish(axes, is_drawn=bool(timed), needs="step_s")


def draw_wire(axes: Axes, report: Mapping[str, object]) -> None:
    """Draw the bytes a supervised token costs, by codec, on a log scale."""
    label_axes(axes, "What travels for one supervised token", "bytes (log scale)", "")
    by_codec = report.get("bytes_per_token_by_codec")
    sizes = dict(by_codec) if isinstance(by_codec, Mapping) else {}
    sizes.setdefault(str(report.get("codec", "this run")), report.get("bytes_per_token"))
    sizes.setdefault("dense", report.get("dense_bytes_per_token"))
    known = {name: read_number(sizes, name) for name in sizes}
    bars = sorted((size, str(name)) for name, size in known.items() if size)
    used = str(report.get("codec", "this run"))
    colours = [BLUE if name == used else GREY for _, name in bars]
    axes.barh([name for _, name in bars], [size for size, _ in bars], color=colours, height=0.6)
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda size, _: f"{size:,.0f}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.invert_yaxis()
    for position, (size, _) in enumerate(bars):
        axes.annotate(
            f"{size:,.0f} B", (size, position), (6, 0), textcoords="offset points", va="center"
        )
    if bars:
        axes.set_xlim(1, bars[-1][0] * 6)
    axes.grid(visible=False, axis="y")
    finish(axes, is_drawn=bool(bars), needs="bytes_per_token")


def read_number(entry: Mapping[str, object], key: str) -> float | None:
    """Return a number, or None if it is missing or something else."""
    value = entry.get(key)
    return float(value) if isinstance(value, (int, float)) else None


def read_series(history: Sequence[Entry], key: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a number was logged, and the numbers."""
    pairs = [(read_number(e, "step"), read_number(e, key)) for e in history]
    known = [(step, value) for step, value in pairs if step is not None and value is not None]
    return [step for step, _ in known], [value for _, value in known]


def label_axes(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Give a panel its words and the common look."""
    axes.set_title(title, loc="left", fontsize=14, color=INK, pad=12)
    axes.set_xlabel(x_label, fontsize=11, color=INK)
    axes.set_ylabel(y_label, fontsize=11, color=INK)
    axes.tick_params(labelsize=10, colors=INK, length=0)
    axes.grid(visible=True, color=FAINT)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def finish(axes: Axes, *, is_drawn: bool, needs: str) -> None:
    """Add the legend, or say in the panel which figures were not measured."""
    if not is_drawn:
        axes.text(0.5, 0.5, f"not measured ({needs})", transform=axes.transAxes, ha="center")
        axes.set_xticks([])
        axes.set_yticks([])
        return
    if axes.get_xscale() == "linear":
        # Room above the curves and bars for the legend and the values.
        axes.set_ylim(0, 1.2 * axes.dataLim.y1)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True))
    if axes.get_legend_handles_labels()[0]:
        axes.legend(
            frameon=False,
            fontsize=11,
            loc="upper right",
            ncols=3,
            handlelength=1.2,
            columnspacing=1.4,
        )
