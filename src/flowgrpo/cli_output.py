"""What the commands say: progress, tables, and one line for each fault that a user can mend."""

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from flowgrpo.forecast import Forecast

OWN_ERRORS = (("scoring", "RewardError"), ("health", "Unhealthy"))  # asked for only if the module is loaded: it is slow


@contextmanager
def reported(debug: bool) -> Iterator[None]:
    """Faults that a user can mend become red lines and exit code 2; anything else is ours and is shown whole."""
    try:
        yield
    except Exception as error:
        if debug or not _is_the_users(error):
            raise
        for line in str(error).splitlines() or [type(error).__name__]:
            typer.secho(f"error: {line}", fg="red", err=True)
        raise typer.Exit(2) from None


def _is_the_users(error: Exception) -> bool:
    own = [getattr(sys.modules.get(f"flowgrpo.{module}"), name, ValueError) for module, name in OWN_ERRORS]
    return isinstance(error, (ValueError, ImportError, OSError, FloatingPointError, *own))


def quiet() -> None:
    """Loading bars of other libraries off: the commands show their own progress. Warnings are one line each."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_args, **_options: f"warning: {message}\n"


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr that appears with the first sample, so that nothing stands before an error."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn(what), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn())
    progress = Progress(*columns, console=Console(stderr=True))
    task = progress.add_task(what, total=total)

    def advance(count: int) -> None:
        progress.start()
        progress.advance(task, count)

    try:
        yield advance
    finally:
        if progress.live.is_started:
            progress.stop()


@contextmanager
def named(path: str) -> Iterator[None]:
    """Faults of a config name its file, where there are several."""
    try:
        yield
    except ValueError as error:
        raise ValueError("\n".join(f"{path}: {line}" if path else line for line in str(error).splitlines())) from error


def print_forecasts(forecasts: "list[Forecast]") -> None:
    """One run in full, several as a table."""
    from rich.console import Console
    from rich.table import Table

    from flowgrpo.forecast import describe, forecast_table, notes, picture

    console = Console(highlight=False)
    if len(forecasts) > 1:
        console.print(forecast_table(forecasts))
        console.print(notes(forecasts), soft_wrap=True)
        return
    (one,) = forecasts
    table = Table(title=f"plan of {one.config.name}", show_header=False, title_justify="left")
    for name, words in describe(one).items():
        table.add_row(name, words)
    console.print(table)
    if one.measured:
        console.print("windows: decided by measurement while the run goes on")
        return
    if not any(one.windows):
        console.print("no window: samples are those of plain inference")
        return
    console.print(f"windows over {one.config.iterations} iterations; the darker, the more of them train the step")
    console.print("\n".join(picture(one.windows, one.config.sampler.num_steps)), markup=False)


def print_rises(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from flowgrpo.tables import rises_table

    Console().print(rises_table(summary))


def print_scores(names: Sequence[str], scores: Sequence[Sequence[float]]) -> None:
    """Mean, spread and number of each reward's scores."""
    import torch
    from rich.console import Console
    from rich.table import Table

    table = Table("reward", "mean", "std", "scored", "missing")
    for name, column in zip(names, torch.tensor(scores).T, strict=True):
        valid = column[~column.isnan()]
        mean, std = (f"{float(valid.mean()):.4g}", f"{float(valid.std(correction=0)):.4g}") if len(valid) else ("-", "-")
        table.add_row(name, mean, std, str(len(valid)), str(len(column) - len(valid)))
    Console().print(table)
