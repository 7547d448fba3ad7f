"""One run of a study: a recipe trained with one seed up to its budget, and what is measured before, between and after."""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging as diffusers_logging
from study_jobs import Arm
from transformers.utils import logging as transformers_logging

from flowgrpo import keys
from flowgrpo.build import Parts, build
from flowgrpo.canaries import CANARIES, group_diversity
from flowgrpo.config import RunConfig, load_config
from flowgrpo.data import Prompt, load_prompts
from flowgrpo.evaluate import Evaluation, evaluate_as_configured, evaluation_steps, load, save
from flowgrpo.metrics import Metrics
from flowgrpo.paired import paired_rise
from flowgrpo.train import evaluated_weights
from flowgrpo.trainer import Trainer
from reward_models.clip_score import ClipScore

ROOT = Path(__file__).parent.parent
CLIP = ROOT / "assets" / "shapes" / "clip"
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
CALLS = ("calls/probe", "calls/rollout", "calls/replay")
CANARY = "canary/"  # before the name of its column
AT_ONCE = 100  # pictures measured together
diffusers_logging.disable_progress_bar()
transformers_logging.disable_progress_bar()


def configured(arm: Arm, seed: int, args: argparse.Namespace) -> RunConfig:
    """The arm's config with what the study sets."""
    fixed = [f"seed={seed}", "iterations=5000", "checkpoint.every=0", "logging.samples_every=0"]
    fixed += [f"name={arm.name}-{seed}", f"output_dir={json.dumps(str(args.out))}", "logging.trackers=[]"]
    if args.heldout is not None:
        fixed.append(f"prompts.heldout={json.dumps(str(args.heldout.resolve()))}")
    config = load_config(arm.path, [*fixed, *arm.overrides, *args.set])
    if config.prompts.heldout is None:
        raise ValueError(f"{arm.path}: a study needs held-out prompts; set prompts.heldout, or give --heldout")
    return config


class Judge:
    """Measures the policy of a run on held-out prompts."""

    def __init__(self, parts: Parts, args: argparse.Namespace) -> None:
        self.parts, self.config = parts, parts.config
        self.prompts = heldout(self.config, args)
        self.diverse = self.prompts[: args.diversity_prompts]
        self.samples = args.diversity_samples
        self.clip = ClipScore(str(CLIP)).clip

    def scores(self, prompts: Sequence[Prompt]) -> Evaluation:
        """Every reward and every canary, of one sample a prompt."""
        result = self._pictures(prompts)
        media = torch.stack([result.media[i] for i in range(len(prompts))])
        canaries = [torch.cat([canary(some) for some in media.split(AT_ONCE)]) for canary in CANARIES.values()]
        names = (*result.names, *(f"{CANARY}{name}" for name in CANARIES))
        return Evaluation(names, torch.cat([result.values, torch.stack(canaries, 1)], 1), {})

    def diversity(self) -> Evaluation:
        """How the samples of a prompt differ: mean cosine distance of their CLIP embeddings, and mean std of a pixel."""
        result = self._pictures([prompt for prompt in self.diverse for _ in range(self.samples)])
        media = torch.stack(list(result.media.values()))
        ids = torch.arange(len(self.diverse)).repeat_interleave(self.samples)
        distance = group_diversity(self.clip.embed_frames(media).mean(1), ids)
        pixels = media.unflatten(0, (-1, self.samples)).std(1).flatten(1).mean(1)
        return Evaluation(("clip_distance", "pixel_std"), torch.stack([distance, pixels], 1), {})

    def _pictures(self, prompts: Sequence[Prompt]) -> Evaluation:
        with evaluated_weights(self.parts):
            return evaluate_as_configured(self.config, self.parts.policy, self.parts.scorer, prompts, keep=range(len(prompts)))


def heldout(config: RunConfig, args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the last evaluation; those in between are the first of them."""
    assert config.prompts.heldout is not None
    return list(load_prompts(config.prompts.heldout).prompts[: args.prompts])


def base_folder(config: RunConfig, args: argparse.Namespace) -> Path:
    """Where the untrained model's measures lie: one folder for all runs that share everything they depend on."""
    return args.out / "base" / f"{keys.key(_base_depends_on(config, args)):016x}"


def ensure_base(config: RunConfig, args: argparse.Namespace) -> None:
    """Measure the untrained model, unless that is on disk."""
    folder = base_folder(config, args)
    if (folder / "diversity").is_dir():
        return
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "depends_on.json").write_text(_base_depends_on(config, args) + "\n", encoding="utf-8")
    judge = Judge(build(config), args)
    save(judge.scores(judge.prompts), folder / "scores")
    save(judge.diversity(), folder / "diversity")


def _base_depends_on(config: RunConfig, args: argparse.Namespace) -> str:
    model, sampler, evaluation = config.model, config.sampler, config.evaluation
    what = {
        "model": model.model_dump(mode="json", include={"pipeline", "revision", "variant", "dtype", "call"}),
        "sampler": sampler.model_dump(
            mode="json", include={"guidance_scale", "negative_prompt", "height", "width", "num_frames"}
        ),
        "steps": evaluation_steps(config),
        "evaluation": evaluation.model_dump(mode="json", include={"guidance_scale", "seed"}),
        "rewards": [reward.model_dump(mode="json", include={"name", "use", "args"}) for reward in config.rewards],
        "prompts": [config.prompts.heldout, args.prompts, args.diversity_prompts, args.diversity_samples],
    }
    return json.dumps(what, sort_keys=True)


def run(arm: Arm, seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train one arm with one seed: gold's rise, every reward and every canary at each mark; at the end the diversity too."""
    config = configured(arm, seed, args)
    judge, base = Judge(build(config), args), load(base_folder(config, args) / "scores")
    metrics = config.folder / "metrics.jsonl"
    metrics.unlink(missing_ok=True)  # of a run that was broken off
    trainer = Trainer(judge.parts, Metrics(metrics))
    points: list[dict[str, Any]] = []
    signs: list[Any] = []
    spent: dict[str, float] = {"seconds": 0.0, "iterations": 0, "samples": 0, "calls": 0}
    for mark in range(1, args.marks + 1):
        _train(trainer, spent, signs, args, mark / args.marks)
        watched = judge.prompts if mark == args.marks else judge.prompts[: args.watch]
        changes = _changes(replace(base, values=base.values[: len(watched)]), judge.scores(watched), watched)
        rise = changes[config.gold]
        points.append({"mark": mark, **spent, **rise, "measured": _by_kind(changes)})
        gold, low, high = (math.nan if rise[name] is None else rise[name] for name in ("rise", "rise_low", "rise_high"))
        print(
            f"{arm.name} seed {seed}: {spent['seconds']:.0f} s, {spent['iterations']} iterations, {spent['samples']} samples, "
            f"rise {gold:+.3f} ({low:+.3f} to {high:+.3f}) on {rise['num_prompts']} prompts",
            flush=True,
        )
    diversity = _changes(load(base_folder(config, args) / "diversity"), judge.diversity(), judge.diverse)
    end = {**points[-1].pop("measured"), "diversity": diversity}
    return {"recipe": arm.name, "seed": seed, "gold": config.gold, "commit": commit(), "points": points, "signs": signs,
            "end": end}  # fmt: skip


def _by_kind(changes: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {
        "reward": {name: change for name, change in changes.items() if not name.startswith(CANARY)},
        "canary": {name.removeprefix(CANARY): change for name, change in changes.items() if name.startswith(CANARY)},
    }


def _changes(base: Evaluation, tuned: Evaluation, prompts: Sequence[Prompt]) -> dict[str, Any]:
    """Before and after of every column, with an interval that resamples whole captions."""
    captions = [prompt.text for prompt in prompts]
    return {name: paired_rise(base.column(name), tuned.column(name), captions).as_json() for name in base.names}


def _train(trainer: Trainer, spent: dict[str, float], signs: list[Any], args: argparse.Namespace, share: float) -> None:
    """Iterate until this share of the budget is spent; what the run's health says goes into `signs`."""
    unit, budget = ("seconds", args.seconds) if args.samples is None else ("samples", args.samples)
    trainer.progress = lambda _: min(1.0, spent[unit] / budget)
    clock = CLOCKS[args.clock]
    while spent[unit] < budget * share:
        began = clock()
        values = trainer.iteration(trainer.next_iteration)
        signs += [[trainer.next_iteration, sign] for sign in trainer.health.look(values)]
        spent["seconds"] += clock() - began
        trainer.next_iteration += 1
        spent["iterations"] += 1
        spent["samples"] += int(values["samples"])
        spent["calls"] += int(sum(values.get(name, 0) for name in CALLS))


def commit() -> str:
    """The commit that the code is at, with "dirty" if it was changed since; "unknown" outside a git checkout."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        name = git("rev-parse", "--short", "HEAD")
        return f"{name} dirty" if git("status", "--porcelain", "--untracked-files=no") else name
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
