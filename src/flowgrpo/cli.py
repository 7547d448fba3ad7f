"""The command line. Heavy imports happen inside the commands, so that help is instant."""

import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import flowgrpo

if TYPE_CHECKING:
    from flowgrpo.config import RunConfig
    from flowgrpo.forecast import Forecast

app = typer.Typer(
    help="Align text-to-image and text-to-video generators with GRPO, through any diffusers pipeline.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="YAML file of the run.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Settings to change, such as sampler.num_steps=10.")
]
HYBRID = "Share of the steps, from the noisiest, that the tuned model makes; the base makes the rest."
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]


def main() -> None:
    """The `flowgrpo` command; reward models of the folder it is called in can be imported."""
    sys.path.append(os.getcwd())
    app()


def _show_version(asked: bool) -> bool:
    if asked:
        typer.echo(f"flowgrpo {flowgrpo.__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _about(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", is_eager=True, callback=_show_version)
    ] = False,
) -> None:
    pass


@app.command("train")
def train_command(
    config: ConfigFile,
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last checkpoint of the run folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Delete an earlier run of that name first.")] = False,
    debug: Debug = False,
) -> None:
    """Train as a config says: check, evaluate, train, evaluate again, export."""
    with _reported(debug):
        settings = _load(config, overrides)
        _quiet()
        from flowgrpo.train import train

        code = train(settings, resume=resume, overwrite=overwrite)
    raise typer.Exit(code)


@app.command("plan")
def plan_command(
    arguments: Annotated[
        list[str], typer.Argument(metavar="CONFIG... [KEY=VALUE]...", help="YAML files, and settings to change in all of them.")
    ],
    processes: Annotated[int, typer.Option(min=1, help="Processes that will share the samples.")] = 1,
    debug: Debug = False,
) -> None:
    """Say what runs will cost, from their configs alone: network calls, updates, memory, windows."""
    with _reported(debug):
        overrides = [text for text in arguments if _is_override(text)]
        configs = [text for text in arguments if not _is_override(text)]
        if not configs:
            raise ValueError(f"plan needs a config, got only settings: {' '.join(overrides)}; name a YAML file first")
        settings = {}
        for path in configs:
            with _named(path if len(configs) > 1 else ""):
                settings[path] = _load(Path(path), overrides)
        from flowgrpo.forecast import forecast

        forecasts = []
        for path, config in settings.items():
            with _named(path if len(settings) > 1 else ""):
                forecasts.append(forecast(config, processes))
        _print_forecasts(forecasts)


@app.command("calibrate")
def calibrate_command(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="JSON file to write, for `calibration` of a config.")] = Path("calibration.json"),
    iterations: Annotated[int, typer.Option(min=1, help="Rollouts to score, of the config's size.")] = 8,
    debug: Debug = False,
) -> None:
    """Measure what scores are usually like under the base model."""
    with _reported(debug):
        settings = _load(config, overrides)
        _quiet()
        from flowgrpo.calibrate import calibrate

        with _progress("rollouts", iterations) as advance:
            content = calibrate(settings, output, iterations, advance)
        for name, usual in content["rewards"].items():
            low, high = usual["quantiles"][0], usual["quantiles"][-1]
            typer.echo(
                f"{name}: {usual['mean']:.4g}, within groups +- {usual['spread']:.3g}, 99 % from {low:.4g} to {high:.4g}"
            )
        typer.echo(f"written to {output}; name it as calibration: {output}")


@app.command("generate")
def generate_command(
    pipeline: Annotated[str, typer.Argument(metavar="PIPELINE", help="Hub id or local folder of a diffusers pipeline.")],
    prompts: Annotated[Path, typer.Option(help="Prompt file, .txt or .jsonl.")],
    output: Annotated[Path, typer.Option(help="Folder for the files; what it has already is kept.")],
    adapter: Annotated[Path | None, typer.Option(help="LoRA folder or file, or a run folder.")] = None,
    hybrid: Annotated[float | None, typer.Option(min=0, max=1, help=HYBRID)] = None,
    samples_per_prompt: Annotated[int, typer.Option(min=1, help="Samples of each prompt.")] = 1,
    num_steps: Annotated[int | None, typer.Option(min=1, help="Denoising steps; default: the pipeline's own.")] = None,
    guidance_scale: Annotated[float | None, typer.Option(min=1, help="Classifier-free; default: pipeline's.")] = None,
    negative_prompt: Annotated[str | None, typer.Option(help="For guidance, unless a prompt has its own.")] = None,
    height: Annotated[int | None, typer.Option(min=1, help="Pixels; default: the pipeline's own.")] = None,
    width: Annotated[int | None, typer.Option(min=1, help="Pixels; default: the pipeline's own.")] = None,
    num_frames: Annotated[int | None, typer.Option(min=1, help="Frames; default: the pipeline's own.")] = None,
    fps: Annotated[float, typer.Option(help="Frames per second of a film.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed; a sample depends on it, its prompt's number and its own.")] = 0,
    batch_size: Annotated[int, typer.Option(min=1, help="Samples in one call; they do not depend on it.")] = 8,
    dtype: Annotated[Literal["float32", "bfloat16"], typer.Option(help="Compute type of the networks.")] = "float32",
    call: Annotated[list[str] | None, typer.Option(metavar="KEY=VALUE", help="A further argument of the call.")] = None,
    debug: Debug = False,
) -> None:
    """Write pictures or films of a prompt file, with a manifest; a call that was cut off goes on where it stopped."""
    with _reported(debug):
        from flowgrpo.data import load_prompts

        if hybrid is not None and adapter is None:
            raise ValueError(f"--hybrid {hybrid:g} cannot take effect without --adapter, the tuned model; give both or none")
        prompt_set, arguments = load_prompts(prompts), _call_arguments(call or [])
        _quiet()
        from flowgrpo.generate import generate, hybrid_from, policy_from

        policy, steps, origin = policy_from(
            pipeline, adapter, dtype=dtype, num_steps=num_steps, guidance_scale=guidance_scale,
            negative_prompt=negative_prompt, height=height, width=width, num_frames=num_frames, call=arguments,
        )  # fmt: skip
        cut = None if hybrid is None else hybrid_from(policy, origin, steps, hybrid)
        with _progress("samples", len(prompt_set) * samples_per_prompt) as advance:
            generate(
                policy, prompt_set.prompts, output, samples_per_prompt=samples_per_prompt, num_steps=steps, seed=seed,
                batch_size=batch_size, fps=fps, hybrid=cut, origin=origin, on_batch=advance,
            )  # fmt: skip
        typer.echo(f"{len(prompt_set)} prompts x {samples_per_prompt} in {output}, described in manifest.jsonl")


@app.command("evaluate")
def evaluate_command(
    config: ConfigFile,
    overrides: Overrides = None,
    tuned: Annotated[
        Path | None, typer.Option(help="Run folder, LoRA folder or pipeline folder; default: the config's run folder.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="JSON file to write; default: evaluation.json beside the trained model.")
    ] = None,
    hybrid: Annotated[float | None, typer.Option(min=0, max=1, help=f"{HYBRID} Sets evaluation.hybrid.")] = None,
    debug: Debug = False,
) -> None:
    """Compare a trained model with its base on the held-out prompts: same prompts, same start noise."""
    with _reported(debug):
        settings = _load(config, [*(overrides or []), *([] if hybrid is None else [f"evaluation.hybrid={hybrid}"])])
        _quiet()
        from flowgrpo.tuned import compare, heldout_prompts, locate, write

        path = tuned or settings.folder
        locate(path)
        num_prompts = len(heldout_prompts(settings))
        with _progress("base and tuned samples", 2 * num_prompts) as advance:
            result = compare(settings, path, on_batch=advance)
        target = output or (path if path.is_dir() else path.parent) / "evaluation.json"
        write(result, target)
        _print_rises(result)
        if cut := result["hybrid"]:
            typer.echo(f"tuned: {cut['tuned_steps']} of {cut['num_steps']} steps are the tuned model's, the rest its base's")
        typer.echo(f"written to {target}")


OWN_ERRORS = (("scoring", "RewardError"), ("health", "Unhealthy"))  # asked for only if the module is loaded: it is slow


@contextmanager
def _reported(debug: bool) -> Iterator[None]:
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


def _load(path: Path, overrides: list[str] | None) -> "RunConfig":
    from flowgrpo.config import load_config

    return load_config(path, overrides or [])


def _call_arguments(texts: list[str]) -> dict[str, Any]:
    import yaml

    arguments = {}
    for text in texts:
        name, separator, value = text.partition("=")
        if not (separator and name):
            raise ValueError(f"--call must look like key=value (max_sequence_length=256), got {text!r}")
        arguments[name] = yaml.safe_load(value)
    return arguments


def _quiet() -> None:
    """Loading bars of other libraries off: the commands show their own progress. Warnings are one line each."""
    from diffusers.utils import logging as diffusers_logging
    from transformers.utils import logging as transformers_logging

    diffusers_logging.disable_progress_bar()
    transformers_logging.disable_progress_bar()
    warnings.formatwarning = lambda message, *_args, **_options: f"warning: {message}\n"


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
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
def _named(path: str) -> Iterator[None]:
    """Faults of a config name its file, where there are several."""
    try:
        yield
    except ValueError as error:
        raise ValueError("\n".join(f"{path}: {line}" if path else line for line in str(error).splitlines())) from error


def _is_override(text: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*=", text) is not None


def _print_forecasts(forecasts: "list[Forecast]") -> None:
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


def _print_rises(summary: dict[str, Any]) -> None:
    from rich.console import Console

    from flowgrpo.tables import rises_table

    Console().print(rises_table(summary))


if __name__ == "__main__":
    main()
