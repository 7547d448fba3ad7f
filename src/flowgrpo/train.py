"""The main job: check, evaluate the base, train, evaluate the result, export, and say what came of it."""

import json
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from flowgrpo import evaluate, figures, metrics, samples
from flowgrpo.adapters import Reference
from flowgrpo.build import Parts, build
from flowgrpo.config import RunConfig
from flowgrpo.data import Prompt
from flowgrpo.evaluate import Evaluation
from flowgrpo.export import export_full, export_lora
from flowgrpo.hybrid import Hybrid, check_hybrid, hybrid_facts, tuned_steps
from flowgrpo.plan import describe
from flowgrpo.run_folder import check_folder, open_folder
from flowgrpo.selfcheck import selfcheck
from flowgrpo.tables import rises_table
from flowgrpo.trainer import Trainer
from flowgrpo.tuned import heldout_prompts

PICTURES_PER_KIND = 4
PICTURES = 24


def train(config: RunConfig, *, resume: bool = False, overwrite: bool = False, console: Console | None = None) -> int:
    """Run a config from start to summary. Returns the exit code: 0 when done or stopped cleanly."""
    started = time.perf_counter()
    accelerator = Accelerator(mixed_precision="no")
    main = accelerator.is_main_process
    console = console or Console(quiet=not main)
    if config.evaluation.hybrid is not None:
        heldout_prompts(config)
        tuned_steps(config.evaluation.hybrid, evaluate.evaluation_steps(config))
    last = check_folder(config, resume=resume, overwrite=overwrite)
    accelerator.wait_for_everyone()
    parts = build(config, accelerator)
    if main:
        open_folder(config, resume=resume)
    accelerator.wait_for_everyone()
    show_plan(parts, console)
    check(parts, console)
    trainer = Trainer(parts, metrics.Metrics(config.folder / "metrics.jsonl", _trackers(config) if main else ()))
    watch = Watch(parts, console)
    with stoppable(trainer, console):
        base = watch.evaluation("base", cached=resume)
        if last is not None:
            trainer.resume(last)
            console.print(f"going on from iteration {trainer.next_iteration} ({last})")
        if main:
            metrics.truncate(trainer.metrics.path, trainer.next_iteration - 1)
        if not run_loop(trainer, watch, console):
            console.print(f"[yellow]stopped at iteration {trainer.next_iteration}; saved. Go on with --resume[/]")
            return 0
        trainer.save()
        with evaluated_weights(parts):
            tuned = watch.evaluation("tuned", cached=False)
            export = export_policy(parts)
    if main:
        finish(parts, watch, base, tuned, export, time.perf_counter() - started, console)
    return 0


def show_plan(parts: Parts, console: Console) -> None:
    """Print the plan and write plan.json."""
    plan = describe(parts)
    table = Table(title=f"plan of {parts.config.name}", show_header=False, title_justify="left")
    for name, text in plan.items():
        table.add_row(name, escape(text))
    console.print(table)
    if parts.accelerator.is_main_process:
        (parts.config.folder / "plan.json").write_text(json.dumps(plan, indent=1), encoding="utf-8")


def check(parts: Parts, console: Console) -> None:
    """Run the self-check. Raises ValueError with the failed check's message."""
    for result in selfcheck(parts):
        mark = "[red]fails[/]" if not result.passed else "[yellow]note[/]" if result.warning else "[green]ok[/]"
        console.print(f"self-check {mark} {result.name}: {escape(result.message)}")
        if not result.passed:
            raise ValueError(f"self-check {result.name!r} failed: {result.message}")


class Watch:
    """Evaluates on held-out prompts and keeps what the pictures and curves need."""

    def __init__(self, parts: Parts, console: Console) -> None:
        self.parts, self.console, self.config = parts, console, parts.config
        self.prompts = heldout_prompts(self.config) if self.config.prompts.heldout else []
        self.shown = choose_pictures(self.prompts)
        self.hybrid = hybrid_of(parts)
        self.scorer = parts.scorer.pointwise(self.config.scoring.cache) if self.prompts else parts.scorer

    def evaluation(self, name: Literal["base", "tuned"], *, cached: bool) -> Evaluation | None:
        """Scores of all held-out prompts under the present weights; read back when a resumed run has them."""
        folder = self.config.folder / "evaluation" / name
        if not self.prompts:
            return None
        if cached and folder.is_dir():
            return evaluate.load(folder)
        with self.console.status(f"evaluating {name} on {len(self.prompts)} held-out prompts"):
            hybrid = self.hybrid.uncut if self.hybrid and name == "base" else self.hybrid
            result = self._evaluate(self.prompts, self.shown, hybrid)
        if self.parts.accelerator.is_main_process:
            evaluate.save(result, folder)
        return result

    def at(self, k: int) -> dict[str, float]:
        """Means over a few held-out prompts, for the curve, in the iterations that are watched."""
        every = self.config.evaluation.every
        if not every or not self.prompts or (k + 1) % every or k + 1 == self.config.iterations:
            return {}
        with evaluated_weights(self.parts):
            result = self._evaluate(self.prompts[: self.config.evaluation.watch_prompts], (), self.hybrid)
        means = result.values.nanmean(0).tolist()
        return {f"eval/{name}/mean": mean for name, mean in zip(result.names, means, strict=True)}

    def _evaluate(self, prompts: list[Prompt], keep: Collection[int], hybrid: Hybrid | None) -> Evaluation:
        policy = self.parts.policy
        return evaluate.evaluate_as_configured(self.config, policy, self.scorer, prompts, hybrid=hybrid, keep=keep)


def hybrid_of(parts: Parts) -> Hybrid | None:
    """The config's hybrid inference, whose base are the weights of this moment: call it before they change."""
    share = parts.config.evaluation.hybrid
    if share is None:
        return None
    check_hybrid(parts.policy.own_scheduler, share, evaluate.evaluation_steps(parts.config))
    reference = parts.reference
    if reference is None or reference.moves:
        reference = Reference(parts.policy.networks, parts.trained, parts.config.model.train)
    return Hybrid(share, reference.active)


def choose_pictures(prompts: list[Prompt]) -> list[int]:
    """Positions of the prompts to show: the first few of each kind, else the first ones."""
    if not all("kind" in p.meta for p in prompts):
        return list(range(min(PICTURES, len(prompts))))
    kinds: dict[str, list[int]] = {}
    for position, prompt in enumerate(prompts):
        texts = {prompts[i].text for i in kinds.setdefault(prompt.meta["kind"], [])}
        if prompt.text not in texts and len(texts) < PICTURES_PER_KIND:
            kinds[prompt.meta["kind"]].append(position)
    return [position for positions in kinds.values() for position in positions]


def run_loop(trainer: Trainer, watch: Watch, console: Console) -> bool:
    """Train to the last iteration with a live display. Returns False when stopped early."""
    config = trainer.config
    rewards = [r.name for r in config.rewards]
    trainer.on_samples, trainer.on_end = _sample_saver(trainer), watch.at
    trainer.on_sign = lambda k, message: console.print(f"[yellow]iteration {k}: {escape(message)}[/]")
    columns = (
        TextColumn("iteration"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[live]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("training", total=config.iterations, completed=trainer.next_iteration, live="")

        def after(k: int, values: Mapping[str, float]) -> None:
            live = "  ".join(f"{n} {values[f'score/{n}/mean']:.3f}" for n in rewards)
            progress.update(task, completed=k + 1, live=f"{live}  {values['seconds/iteration']:.2f} s")
            if not console.is_terminal and (k + 1) % max(1, config.iterations // 10) == 0:
                console.print(f"iteration {k + 1} of {config.iterations}: {live}")

        try:
            return trainer.run(config.iterations, after)
        except torch.OutOfMemoryError as error:
            raise ValueError(
                f"out of device memory in iteration {trainer.next_iteration}: lower sampler.batch_size (now "
                f"{config.sampler.batch_size}) or optimizer.micro_batch_size (now {config.optimizer.micro_batch_size}), or set "
                "model.gradient_checkpointing=true; the last checkpoint is untouched, --resume goes on from it"
            ) from error


@contextmanager
def stoppable(trainer: Trainer, console: Console) -> Iterator[None]:
    """Ctrl-C or SIGTERM asks the trainer to save and stop; a second one ends the process at once."""

    def ask(number: int, _: Any) -> None:
        if trainer.stop_asked:
            raise KeyboardInterrupt
        trainer.stop_asked = True
        console.print(f"[yellow]{signal.Signals(number).name}: saving, then stopping (again to end at once)[/]")

    previous = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


@contextmanager
def evaluated_weights(parts: Parts) -> Iterator[None]:
    """The weights that count: the moving average, where there is one."""
    if parts.ema is None:
        yield
    else:
        with parts.ema.applied():
            yield


def export_policy(parts: Parts) -> Path:
    """Write what plain diffusers loads: ``adapter/`` (LoRA) or ``pipeline/`` (full weights)."""
    folder = parts.config.folder
    pipeline, networks = parts.policy.pipeline, parts.policy.networks
    if parts.config.model.train == "lora":
        target = folder / "adapter"
        if parts.accelerator.is_main_process:
            export_lora(pipeline, networks, target)
    else:
        target = folder / "pipeline"
        if parts.accelerator.is_main_process:
            export_full(pipeline, target, parts.policy.own_scheduler)
    return target


def finish(parts: Parts, watch: Watch, base: Evaluation | None, tuned: Evaluation | None, export: Path,
           seconds: float, console: Console) -> None:  # fmt: skip
    """Write summary.json and the pictures, and print what came of the run."""
    folder = parts.config.folder
    rows = metrics.read(folder / "metrics.jsonl")
    summary: dict[str, Any] = {"name": parts.config.name, "iterations": parts.config.iterations, "seconds": seconds}
    paths = {"folder": folder, "export": export, "metrics": folder / "metrics.jsonl", "curves": folder / "curves.png"}
    if base is not None and tuned is not None:
        summary |= evaluate.summary(base, tuned, watch.prompts, parts.config.gold)
        summary["hybrid"] = hybrid_facts(parts.config.evaluation.hybrid, evaluate.evaluation_steps(parts.config))
        paths["before_after"] = folder / "before_after.png"
        figures.before_after_of(paths["before_after"], watch.prompts, base, tuned, parts.config.gold)
    figures.curves(paths["curves"], rows, summary)
    summary["paths"] = {name: str(path) for name, path in paths.items()}
    (folder / "summary.json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    print_summary(summary, console)


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """The end of a run on the terminal."""
    if "rewards" in summary:
        console.print(rises_table(summary))
    console.print(f"{summary['seconds']:.0f} s; " + ", ".join(f"{k}: {v}" for k, v in summary["paths"].items()))


def _trackers(config: RunConfig) -> list[metrics.Tracker]:
    unknown = [t for t in config.logging.trackers if t not in metrics.TRACKERS]
    if unknown:
        raise ValueError(f"logging.trackers: must be among {', '.join(metrics.TRACKERS)}, got {unknown}")
    return [metrics.TRACKERS[name](config.folder / name) for name in config.logging.trackers]


def _sample_saver(trainer: Trainer) -> Any:
    config = trainer.config

    def save(k: int, trajectory: Any, scores: Any) -> None:
        if trainer.shows(k) and trainer.parts.accelerator.is_main_process:
            samples.save_samples(config.folder / "samples" / f"it{k:06d}", trajectory, scores, iteration=k, seed=config.seed)

    return save
