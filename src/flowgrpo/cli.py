"""The command line. Heavy imports happen inside the commands, so that help is instant."""

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

import flowgrpo
from flowgrpo.cli_output import named, print_forecasts, print_rises, print_scores, progress, quiet, reported

if TYPE_CHECKING:
    from flowgrpo.config import RunConfig

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
    with reported(debug):
        settings = _load(config, overrides)
        quiet()
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
    with reported(debug):
        overrides = [text for text in arguments if _is_override(text)]
        configs = [text for text in arguments if not _is_override(text)]
        if not configs:
            raise ValueError(f"plan needs a config, got only settings: {' '.join(overrides)}; name a YAML file first")
        settings = {}
        for path in configs:
            with named(path if len(configs) > 1 else ""):
                settings[path] = _load(Path(path), overrides)
        from flowgrpo.forecast import forecast

        forecasts = []
        for path, config in settings.items():
            with named(path if len(settings) > 1 else ""):
                forecasts.append(forecast(config, processes))
        print_forecasts(forecasts)


@app.command("calibrate")
def calibrate_command(
    config: ConfigFile,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option(help="JSON file to write, for `calibration` of a config.")] = Path("calibration.json"),
    iterations: Annotated[int, typer.Option(min=1, help="Rollouts to score, of the config's size.")] = 8,
    debug: Debug = False,
) -> None:
    """Measure what scores are usually like under the base model."""
    with reported(debug):
        settings = _load(config, overrides)
        quiet()
        from flowgrpo.calibrate import calibrate

        with progress("rollouts", iterations) as advance:
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
    with reported(debug):
        from flowgrpo.data import load_prompts

        if hybrid is not None and adapter is None:
            raise ValueError(f"--hybrid {hybrid:g} cannot take effect without --adapter, the tuned model; give both or none")
        prompt_set, arguments = load_prompts(prompts), _call_arguments(call or [])
        quiet()
        from flowgrpo.generate import generate, hybrid_from, policy_from

        policy, steps, origin = policy_from(
            pipeline, adapter, dtype=dtype, num_steps=num_steps, guidance_scale=guidance_scale,
            negative_prompt=negative_prompt, height=height, width=width, num_frames=num_frames, call=arguments,
        )  # fmt: skip
        cut = None if hybrid is None else hybrid_from(policy, origin, steps, hybrid)
        with progress("samples", len(prompt_set) * samples_per_prompt) as advance:
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
    with reported(debug):
        settings = _load(config, [*(overrides or []), *([] if hybrid is None else [f"evaluation.hybrid={hybrid}"])])
        quiet()
        from flowgrpo.tuned import compare, heldout_prompts, locate, write

        path = tuned or settings.folder
        locate(path)
        num_prompts = len(heldout_prompts(settings))
        with progress("base and tuned samples", 2 * num_prompts) as advance:
            result = compare(settings, path, on_batch=advance)
        target = output or (path if path.is_dir() else path.parent) / "evaluation.json"
        write(result, target)
        print_rises(result)
        if cut := result["hybrid"]:
            typer.echo(f"tuned: {cut['tuned_steps']} of {cut['num_steps']} steps are the tuned model's, the rest its base's")
        typer.echo(f"written to {target}")


@app.command("score")
def score_command(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Folders, tables (.jsonl, .parquet), pictures, films.")
    ],
    rewards: Annotated[list[str], typer.Option(help="YAML file with rewards, such as a run's, or package.module:Name.")],
    output: Annotated[Path, typer.Option(help="Parquet file to write; what was scored before a stop is kept beside it.")],
    prompts: Annotated[Path | None, typer.Option(help="Prompt file that a manifest's prompt_id counts in.")] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Files read and scored together.")] = 32,
    debug: Debug = False,
) -> None:
    """Score pictures and films, made here or elsewhere; a call that was cut off goes on where it stopped."""
    with reported(debug):
        from flowgrpo.data import load_prompts
        from flowgrpo.score import find_items, read_rewards, score_items, write_table

        if output.exists():
            raise ValueError(f"{output} exists; remove it, or give another output")
        items = find_items(paths, None if prompts is None else load_prompts(prompts))
        configs = read_rewards(rewards)
        quiet()
        from accelerate import Accelerator

        from flowgrpo.build import build_scorer

        scorer = build_scorer(configs, str(Accelerator().device)).pointwise()
        log = output.with_name(output.name + ".jsonl")
        with progress("files", len(items)) as advance:
            scores = score_items(scorer, items, log, batch_size=batch_size, on_batch=advance)
        write_table(output, items, scorer.names, scores)
        log.unlink()
        print_scores(scorer.names, scores)
        typer.echo(f"written to {output}")


@app.command("serve")
def serve_command(
    rewards: Annotated[list[str], typer.Argument(metavar="REWARDS...", help="YAML file with rewards, or package.module:Name.")],
    host: Annotated[str, typer.Option(help="Address to listen on; one that others reach needs a token.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0: any that is free.")] = 8000,
    token_env: Annotated[str, typer.Option(help="Environment variable that holds the bearer token.")] = "FLOWGRPO_TOKEN",
    max_mb: Annotated[int, typer.Option(min=1, help="Megabytes of a request, at most.")] = 512,
    max_batch: Annotated[int, typer.Option(min=1, help="Samples of several requests scored together, at most.")] = 64,
    debug: Debug = False,
) -> None:
    """Serve reward models to runs elsewhere, which name them as reward_models.remote:Remote."""
    with reported(debug):
        token = os.environ.get(token_env)
        if token is None and host not in ("127.0.0.1", "localhost", "::1"):
            raise ValueError(
                f"{host} can be reached by others, so requests need a token; set {token_env}, or listen on 127.0.0.1"
            )
        from flowgrpo.score import read_rewards

        configs = read_rewards(rewards)
        quiet()
        from accelerate import Accelerator

        from flowgrpo.build import build_scorer
        from flowgrpo.server import Limits, app_of

        scorer = build_scorer(configs, str(Accelerator().device)).pointwise()
        served = app_of(scorer, token, Limits(max_mb * 2**20, max_batch))
        import uvicorn

        typer.echo(f"serving {', '.join(scorer.names)}{'' if token else ', without a token'}; Ctrl-C ends it")
        uvicorn.run(served, host=host, port=port, log_level="warning")


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


def _is_override(text: str) -> bool:
    return re.match(r"[A-Za-z_][\w.]*=", text) is not None


if __name__ == "__main__":
    main()
