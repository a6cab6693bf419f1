"""Oracle: the numbers put in, found again in the figure's artists and the printed lines."""

import io
import warnings
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from rich.console import Console

from student_trainer.report import (
    FIGURES,
    draw_held_out,
    draw_losses,
    draw_time,
    draw_wire,
    print_report_table,
    write_report,
)

REPORT: dict[str, object] = {
    "world_size": 2,
    "parallelism": "fsdp2",
    "transport": "grpc",
    "steps": 4,
    "supervised_tokens": 18231,
    "eval_kl_before": 4.95,
    "eval_kl_after": 1.91,
    "eval_ce_before": 7.79,
    "eval_ce_after": 4.75,
    "eval_top1_agreement_before": 0.11,
    "eval_top1_agreement_after": 0.32,
    "bytes_per_token": 198.4,
    "dense_bytes_per_token": 98304,
    "teacher_wait_fraction": 0.021,
    "train_tokens_per_s": 251.2,
    "peak_rank_rss_gib": 2.345,
    "remote_vs_local_loss_abs_diff": 2.4e-7,
    "codec": "topk",
}
HISTORY: list[dict[str, float]] = [
    {"step": 1, "kd_loss": 5.0, "ce_loss": 7.0, "step_s": 4.0, "teacher_wait_s": 1.0},
    {"step": 2, "kd_loss": 4.0, "ce_loss": 6.0, "step_s": 3.0, "teacher_wait_s": 0.5},
    {"step": 2, "eval_kl": 3.0},
    {"step": 3, "kd_loss": 3.0, "step_s": 3.0},
    {"step": 4, "train_runtime": 10.0},
]


def printed(report: dict[str, object]) -> list[str]:
    console = Console(file=io.StringIO(), width=100)
    print_report_table(report, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


@pytest.mark.parametrize("history", [HISTORY, []])
@pytest.mark.parametrize("report", [REPORT, {}, {"bytes_per_token": 43.0, "eval_kl_after": 1.0}])
def test_whatever_was_measured_gives_one_png_of_1600_by_1000(
    report: dict[str, object], history: list[dict[str, float]], tmp_path: Path
) -> None:
    path = tmp_path / "new" / "report.png"

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_report(report, history, path)

    pixels = imread(path)
    assert pixels.shape[:2] == (1000, 1600)
    assert pixels.min() < 0.5 < pixels.max()


def test_loss_parts_are_drawn_at_the_steps_that_logged_them() -> None:
    axes = Figure().subplots()

    draw_losses(axes, HISTORY)

    kl, ce = axes.lines
    assert list(zip(kl.get_xdata(), kl.get_ydata(), strict=True)) == [(1, 5), (2, 4), (3, 3)]
    assert list(zip(ce.get_xdata(), ce.get_ydata(), strict=True)) == [(1, 7), (2, 6)]


def test_held_out_kl_runs_from_before_over_evaluations_to_after() -> None:
    axes = Figure().subplots()

    draw_held_out(axes, REPORT, HISTORY)

    (line,) = axes.lines
    points = list(zip(line.get_xdata(), line.get_ydata(), strict=True))
    assert points == [(0, 4.95), (2, 3.0), (4, 1.91)]


def test_parts_of_a_step_stack_to_the_whole_step() -> None:
    history = [{**entry, "forward_backward_s": 1.5} for entry in HISTORY if "step_s" in entry]
    axes = Figure().subplots()

    draw_time(axes, REPORT, history)

    tops = [bar.get_y() + bar.get_height() for bar in axes.patches]
    assert [container.get_label() for container in axes.containers] == [
        "waiting for the teacher",
        "forward and backward",
        "optimizer, data, other",
    ]
    assert tops == pytest.approx([1.0, 0.5, 0.0, 2.5, 2.0, 1.5, 4.0, 3.0, 3.0])


def test_a_step_without_its_parts_shows_waiting_and_the_rest() -> None:
    axes = Figure().subplots()

    draw_time(axes, REPORT, HISTORY)

    labels = [container.get_label() for container in axes.containers]
    assert labels == ["waiting for the teacher", "student and all else"]


def test_codecs_stand_beside_dense_on_a_log_scale() -> None:
    axes = Figure().subplots()

    draw_wire(axes, {**REPORT, "bytes_per_token_by_codec": {"topk": 198.4, "hidden8": 580}})

    assert [bar.get_width() for bar in axes.patches] == [198.4, 580, 98304]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["topk", "hidden8", "dense"]
    assert axes.get_xscale() == "log"


def test_a_panel_without_data_says_what_was_not_measured() -> None:
    axes = Figure().subplots()

    draw_losses(axes, [])

    assert [text.get_text() for text in axes.texts] == ["not measured (kd_loss or ce_loss)"]


def test_the_table_has_one_aligned_line_a_figure() -> None:
    lines = [line for line in printed(REPORT) if "│" in line]

    assert len(lines) == len(FIGURES)
    assert len({len(line) for line in lines}) == 1
    assert any("held-out KL after" in line and "1.910 nats" in line for line in lines)
    assert any("98,304 B" in line for line in lines)
    assert any("2.4e-07" in line for line in lines)


def test_a_missing_figure_is_printed_as_not_measured() -> None:
    lines = [line for line in printed({"steps": 3}) if "│" in line]

    assert sum("not measured" in line for line in lines) == len(FIGURES) - 1
