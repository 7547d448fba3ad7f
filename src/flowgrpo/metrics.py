"""Named numbers put together over micro-batches and processes, written as JSON lines; trackers are plug-ins."""

import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["MEANINGS", "TRACKERS", "Metrics", "TensorBoard", "Tracker", "Wandb", "meaning", "read", "truncate"]

SUMS = {
    "calls/probe", "calls/replay", "calls/rollout", "samples", "samples/no_signal", "samples/not_finite",
    "score/<name>/missing", "score/<name>/silent_groups",
}  # fmt: skip
MAXIMA = {"ratio/max_gap"}

MEANINGS: dict[str, str] = {
    "advantage/abs_mean": "Mean size of the advantages, without sign. 0 means that nothing is learnt.",
    "advantage/zero_std_groups": "Share of groups, in [0, 1], whose signals are all equal: their advantage is 0.",
    "calls/probe": "Denoising steps that measured where the reward varies, for the variance window; else 0.",
    "calls/replay": "Denoising steps of the update, summed over samples and processes; guidance makes two passes of each.",
    "calls/rollout": "Denoising steps of the rollout, summed over samples and processes; guidance makes two passes of each.",
    "canary/group_diversity": "Mean cosine distance of the clean latents of a prompt's samples; near 0 they have become one.",
    "canary/<name>": "Mean of a cheap measure of the samples (flowgrpo.canaries); far from the start's, pictures break.",
    "canary/<name>/std": "Its standard deviation over the samples: at the start, the unit in which health measures its drift.",
    "clip_fraction/high": "Share of ratios held back by the upper end of the clip range.",
    "clip_fraction/low": "Share of ratios held back by the lower end of the clip range.",
    "data_loss": "Matching error on the data of the config's data section, at the trained levels, before its weight.",
    "dropped": "Share of (sample, step) pairs left out because the policy has gone far enough there (dppo).",
    "eval/<name>/mean": "Mean score on held-out prompts with the evaluation sampler; unit as the model declares.",
    "grad_norm": "Norm of the gradient over all trained weights before it is limited, mean over the updates.",
    "grad_norm/<place>": "Norm of the gradient of one window step or level, first micro-batch of the iteration.",
    "grad_share/<place>": "Its share in the sum of these norms: which step or level rules the update.",
    "kl": "Divergence of the policy from the reference at the trained steps, before its weight.",
    "kl_old": "Mean divergence of the policy from the one that sampled, at the trained steps; 0 on policy (dppo).",
    "loss": "What the optimizer minimises, mean over micro-batches; its gradient counts, its value says little.",
    "lr": "Learning rate of the last update of the iteration.",
    "matching_error": "Mean squared error of the velocity against noise minus sample, at the trained levels (forward family).",
    "margin": "How far the policy has got the way it is pushed: u times the centred advantage, or the logit (dpo, dgpo, crd).",
    "moved": "Mean squared difference of the velocity from the old policy's, at the trained levels; 0 with one update.",
    "moved/<place>": "The same by number of the level, 0 the first.",
    "ratio/effective": "Share of samples that count under the ratios, (sum r)^2 / (n sum r^2), in a micro-batch; 1 on policy.",
    "ratio/max_gap": "Largest |log ratio| of replay to rollout before the first update; far below the clip range.",
    "ratio/mean": "Mean ratio of the present policy to the one that sampled, as the objective takes it; 1 on policy.",
    "ratio/mean/<place>": "The same by window step, or by number of the level.",
    "ratio/spread": "Mean |log ratio|: how far the policy is from the one that sampled, in units of the clip range.",
    "ratio/spread/<place>": "The same by window step, or by number of the level.",
    "samples": "Samples of the iteration, over all processes.",
    "samples/no_signal": "Samples without a signal, their scores missing or their pixels not finite: they do not train.",
    "samples/not_finite": "Samples with NaN or infinite pixels or latents; no reward model sees them, and they do not train.",
    "score/<name>/mean": "Mean of a reward model's raw scores over the valid samples; unit as the model declares.",
    "score/<name>/missing": "Samples that this reward model should have scored and has not; its policy says what follows.",
    "score/<name>/silent_groups": "Groups in which this reward has no say: it does not apply, or its scores are missing there.",
    "score/<name>/outside": "Share of its scores beyond the lowest and highest quantile of the calibration; usually 0.01.",
    "score/<name>/saturation": "Share of its usual spread within groups that is gone: 0 as usual, 1 says nothing more.",
    "score/<name>/seconds": "Seconds that its model took in the iteration, mean over processes; scoring.overlap hides them.",
    "score/<name>/share": "Its mean weight in a group as the signal made it (taros, saturation_aware); those of all sum to 1.",
    "score/<name>/std": "Standard deviation of its raw scores over the valid samples of the iteration.",
    "score/<name>/tau": "Kendall's tau of advantages and this score within groups: 1, it decides; 0, it has no say.",
    "score/<name>/tied": "Share of groups in which this score is the same for all samples, so that it says nothing.",
    "score/<name>/within": "Mean standard deviation of its scores within groups (over n); near 0 it has no say.",
    "seconds/iteration": "Wall-clock seconds of the whole iteration.",
    "seconds/rollout": "Wall-clock seconds of sampling.",
    "seconds/score": "Wall-clock seconds that the loop waited for scores.",
    "seconds/update": "Wall-clock seconds of replay, backward passes and optimizer steps.",
    "signal/mean": "Mean of the signal, the scores put together, over the valid samples.",
    "unique_prompts": "Different prompts in the iteration; equal to prompts_per_iteration.",
    "window/first": "First stochastic step of the iteration; step 0 is the noisiest.",
    "window/last": "Last stochastic step of the iteration.",
}


def meaning(name: str) -> str:
    """What a metric means. Raises ValueError if nobody has written it down."""
    return MEANINGS[_pattern(name)]


def _pattern(name: str) -> str:
    """The entry of `MEANINGS` for this metric, where `<name>` stands for one part without a slash, `<place>` for a number."""
    parts = name.split("/")
    for pattern in MEANINGS:
        wanted = pattern.split("/")
        if len(wanted) == len(parts) and all(_fits(w, p) for w, p in zip(wanted, parts, strict=True)):
            return pattern
    raise ValueError(f"metric {name!r} has no written meaning; add it to flowgrpo.metrics.MEANINGS and docs/metrics.md")


def _fits(wanted: str, part: str) -> bool:
    return wanted == part or (part.isdigit() if wanted == "<place>" else bool(part) and wanted == "<name>")


@runtime_checkable
class Tracker(Protocol):
    """Where else an iteration's numbers go."""

    def log(self, values: Mapping[str, int | float], iteration: int) -> None: ...


class TensorBoard:
    """Writes event files into a folder."""

    def __init__(self, folder: str | Path) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder))

    def log(self, values: Mapping[str, int | float], iteration: int) -> None:
        """One point a metric."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, iteration)
        self._writer.flush()


class Wandb:
    """Logs to Weights & Biases; the run is named after the folder above. Raises ImportError without the extra."""

    def __init__(self, folder: str | Path) -> None:
        try:
            import wandb  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise ImportError("tracker wandb needs its package: pip install 'flowgrpo[wandb]'") from error
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._run = wandb.init(project="flowgrpo", name=Path(folder).resolve().parent.name, dir=str(folder))

    def log(self, values: Mapping[str, int | float], iteration: int) -> None:
        """One point a metric."""
        self._run.log(dict(values), step=iteration)


TRACKERS: dict[str, Callable[[str | Path], Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb}


class Metrics:
    """Collects an iteration's numbers and writes one line of `metrics.jsonl`.

    A name is the mean of what was added, or the sum for those in `SUMS` and the largest for those in `MAXIMA`; NaN
    entries are left out. Only three numbers a name are kept, never a graph. A tracker that fails warns once and is off.
    """

    def __init__(self, path: str | Path, trackers: Iterable[Tracker] = ()) -> None:
        self.path = Path(path)
        self.trackers = list(trackers)
        self._totals: dict[str, Tensor] = {}

    def add(self, name: str, value: int | float | Tensor) -> None:
        """Add one number, or every entry of a tensor, to `name`. Raises ValueError if its meaning is unwritten."""
        _pattern(name)
        values = value.detach() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        values = values.to("cpu" if values.device.type == "mps" else values.device, torch.float64).flatten()
        valid = values[~values.isnan()]
        largest = valid.max() if len(valid) else valid.new_tensor(-math.inf)
        new = torch.stack([valid.sum(), valid.new_tensor(len(valid)), largest])
        self._totals[name] = _combined(torch.stack([self._totals[name], new])) if name in self._totals else new

    def update(self, values: Mapping[str, int | float | Tensor]) -> None:
        """`add` each."""
        for name, value in values.items():
            self.add(name, value)

    def reduce(self, accelerator: Any = None) -> dict[str, float]:
        """What was collected, over all processes, NaN where no entry was valid; empties the collection.

        Sums, counts and maxima cross in one float64 tensor: processes may have added different numbers of entries, but
        each must have added the same names. `accelerator` is accelerate's, None for a single process.
        """
        names = sorted(self._totals)
        if not names:
            return {}
        totals = torch.stack([self._totals[name].cpu() for name in names])[None]
        self._totals = {}
        if accelerator is not None and accelerator.num_processes > 1:
            totals = accelerator.gather(totals.to(accelerator.device)).cpu()
        return {name: _value(name, *row) for name, row in zip(names, _combined(totals).tolist(), strict=True)}

    def mean(self, name: str, accelerator: Any = None) -> float:
        """The mean of what was added to `name` so far, over all processes; NaN where nothing was."""
        total = self._totals.get(name, torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64)).cpu()[None]
        if accelerator is not None and accelerator.num_processes > 1:
            total = accelerator.gather(total.to(accelerator.device)).cpu()
        value, count, _ = _combined(total).tolist()
        return value / count if count else math.nan

    def write(self, iteration: int, values: Mapping[str, int | float]) -> None:
        """Append one line to the file and tell the trackers. On several processes, call it on the main one."""
        for name in values:
            _pattern(name)
        line = {"iteration": iteration} | {name: float(values[name]) for name in sorted(values)}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        for tracker in list(self.trackers):
            self._tell(tracker, values, iteration)

    def _tell(self, tracker: Tracker, values: Mapping[str, int | float], iteration: int) -> None:
        try:
            tracker.log(values, iteration)
        except Exception as error:  # a logger's failure, of whatever kind, must not end a run
            self.trackers.remove(tracker)
            warnings.warn(
                f"tracker {type(tracker).__name__} failed ({error!r}) and is off now; {self.path} goes on", stacklevel=3
            )


def _combined(totals: Tensor) -> Tensor:
    """Several (sum, count, maximum) rows, (n, ..., 3), as one."""
    return torch.cat([totals[..., :2].sum(0), totals[..., 2:].amax(0)], dim=-1)


def _value(name: str, total: float, count: float, largest: float) -> float:
    if not count:
        return math.nan
    pattern = _pattern(name)
    return total if pattern in SUMS else largest if pattern in MAXIMA else total / count


def read(path: str | Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl`; a last line that was cut off by a killed run is left out."""
    lines = Path(path).read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def truncate(path: str | Path, iteration: int) -> None:
    """Drop the lines after this iteration, which a resumed run will write again."""
    path = Path(path)
    if not path.exists():
        return
    kept = [row for row in read(path) if row["iteration"] <= iteration]
    temporary = path.with_name(f"{path.name}.tmp")
    temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    temporary.replace(path)


def markdown() -> str:
    """The text of docs/metrics.md."""
    rows = "".join(f"| `{name}` | {text} |\n" for name, text in sorted(MEANINGS.items()))
    return (
        "# Metrics\n\nEach iteration is one line of `metrics.jsonl` in the run folder, and one point in TensorBoard. "
        "`<name>` stands for the name of a reward in the config, `<place>` for a window step or the number of a level.\n"
        "This page is written by `python -m flowgrpo.metrics > docs/metrics.md`.\n\n"
        f"| metric | meaning |\n| --- | --- |\n{rows}"
    )


if __name__ == "__main__":
    print(markdown(), end="")
