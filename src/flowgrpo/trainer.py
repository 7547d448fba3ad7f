"""The loop: prompts, trajectory, scores, signal, advantages, loss, update."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from flowgrpo import run_state
from flowgrpo.adapters import gradient_norm
from flowgrpo.build import Parts, when
from flowgrpo.data import rank_slice
from flowgrpo.group_noise import node_means
from flowgrpo.losses import Losses, micro_batches
from flowgrpo.metrics import Metrics
from flowgrpo.missing import missing_scores, signal_of, silent_groups
from flowgrpo.probe import probe
from flowgrpo.rollout import Noise, Row, Trajectory, rollout
from flowgrpo.scoring import RewardError, Scores
from flowgrpo.variance_window import ProbingWindow


class Interrupted(Exception):
    """The run was asked to stop while it was still sampling; nothing of this iteration has been learnt yet."""


class Trainer:
    """Improves a policy, an iteration at a time.

    All randomness is keyed by (seed, iteration), so an iteration depends on nothing but the weights, the optimizer and its
    number: a resumed run is the same run.
    """

    def __init__(self, parts: Parts, metrics: Metrics) -> None:
        self.parts, self.config, self.metrics = parts, parts.config, metrics
        self.next_iteration = 0
        self.stop_asked = False
        self.on_samples: Callable[[int, Trajectory, Scores], None] = lambda *_: None
        self.on_end: Callable[[int], Mapping[str, float]] = lambda _: {}

    def run(self, until: int, after: Callable[[int, dict[str, float]], None] = lambda *_: None) -> bool:
        """Iterate up to `until`, saving on the way. Returns False when it was stopped early, after saving."""
        while self.next_iteration < until:
            window = self.parts.choices.window
            before = window.state_dict() if isinstance(window, ProbingWindow) else {}
            try:
                values = self.iteration(self.next_iteration)
            except (Interrupted, RewardError) as stop:  # the iteration has not learnt anything yet, and will begin anew
                if isinstance(window, ProbingWindow):
                    window.load_state_dict(before)
                self.save()
                if isinstance(stop, Interrupted):
                    return False
                raise
            self.next_iteration += 1
            after(self.next_iteration - 1, values)
            every = self.config.checkpoint.every
            stopping = self._agreed_stop() and self.next_iteration < until
            if stopping or (every and self.next_iteration % every == 0):
                self.save()
            if stopping:
                return False
        return True

    def iteration(self, k: int) -> dict[str, float]:
        """One rollout and its updates; returns the iteration's metrics, which are also written."""
        with self._timed("iteration"):
            with self._timed("rollout"):
                trajectory = self.rollout(k)
            with self._timed("score"):
                scores = self.parts.scorer(trajectory.media, trajectory.prompts, latents=trajectory.x0)
            advantages = self.advantages(scores, trajectory)
            self.on_samples(k, trajectory, scores)
            self._set_learning_rate(k)
            with self._timed("update"):
                self.learn(Losses(self.parts, trajectory, advantages, self.metrics))
        self.metrics.update(self.on_end(k))
        return self._finish(k, trajectory)

    def rollout(self, k: int) -> Trajectory:
        """This process's share of the iteration's samples."""
        parts, moment = self.parts, when(self.config, k)
        parts.policy.forget()
        self._check_stop()
        alone = parts.accelerator.num_processes == 1  # others may have another number of batches: they agree here only
        between = self._check_stop if alone else lambda: None
        self.metrics.add("calls/probe", probe(parts, moment, between))
        prompts = [parts.prompts[i] for i in parts.group_sampler.at(k)]
        rows = [Row(prompt, sample) for prompt in prompts for sample in range(self.config.group_size)]
        accelerator = parts.accelerator
        mine = rank_slice(len(rows), accelerator.process_index, accelerator.num_processes)
        dynamics = parts.dynamics(parts.choices.window.at(moment))
        noise = Noise(self.config.seed, k, parts.choices.group_noise)
        size = self.config.sampler.batch_size
        return rollout(parts.policy, rows[mine.start : mine.stop], dynamics, noise, size, between)

    def advantages(self, scores: Scores, trajectory: Trajectory) -> Tensor:
        """Advantages (b, w) of this process's samples at each window step, from the statistics of whole groups.

        A step's signals are those of its nodes: where samples are still one, their mean. Without a window there is one column.
        """
        parts, choices, window = self.parts, self.parts.choices, trajectory.dynamics.window
        accelerator = parts.accelerator
        values, asked, ids = (self._gather(part) for part in (scores.values, scores.was_asked, trajectory.group_ids))
        settled = parts.scorer.settle(values, asked, ids)
        signal = signal_of(choices.signal, settled, ids, parts.scorer.weights)
        if not signal.isfinite().any():
            raise RewardError(
                f"iteration {self.next_iteration}: no sample has all its weighted scores, so nothing can be learnt; mend the "
                f"reward that is missing ({parts.scorer.account(values, asked)}), then go on with --resume"
            )
        samples = range(self.config.group_size)
        columns = []
        for step in window or range(1):
            nodes = torch.tensor([trajectory.within.node(i, step, window) for i in samples]).repeat(len(ids) // len(samples))
            columns.append(choices.advantage(node_means(signal, torch.stack([ids, nodes], 1)), ids))
        advantages = torch.stack(columns, 1)
        self._log_scores(scores.names, values, signal, advantages, ids)
        self._log_missing(scores, missing_scores(values, asked), silent_groups(settled, ids), signal)
        mine = rank_slice(len(ids), accelerator.process_index, accelerator.num_processes)
        return advantages[mine.start : mine.stop].to(accelerator.device)

    def learn(self, losses: Losses) -> None:
        """All updates of an iteration, each on an equal part of this process's samples."""
        size, count = self.parts.geometry.samples_per_update, self.config.optimizer.micro_batch_size
        slices = [range(i, i + size) for i in range(0, self.parts.geometry.samples_per_process, size)]
        losses.remember([batch for rows in slices[1:] for batch in micro_batches(rows, count)])
        for number, rows in enumerate(slices):
            self.update(losses, rows, first=number == 0)

    def update(self, losses: Losses, rows: range, first: bool) -> None:
        """One optimizer step on `rows`: gradients are summed over micro-batches and steps or levels, then averaged."""
        parts = self.parts
        for batch in micro_batches(rows, self.config.optimizer.micro_batch_size):
            for piece in losses.of(batch, first):
                (piece / len(rows)).backward()
        self._average_gradients()
        norm = gradient_norm(parts.trained, self.config.optimizer.max_grad_norm)
        if not norm < float("inf"):
            raise FloatingPointError(
                f"iteration {self.next_iteration}: the gradient is not finite ({norm}); the last checkpoint is untouched: "
                "resume from it with a lower optimizer.lr or a smaller objective.clip_range"
            )
        self.metrics.add("grad_norm", norm)
        parts.optimizer.step()
        parts.optimizer.zero_grad(set_to_none=True)
        if parts.ema is not None:
            parts.ema.update()

    def save(self) -> Path:
        """Write a checkpoint: weights, optimizer, average, and where the run stands."""
        return run_state.save(self.parts, self.next_iteration)

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint. Raises ValueError when it does not fit this run."""
        self.next_iteration = run_state.load(self.parts, folder)

    def _average_gradients(self) -> None:
        accelerator = self.parts.accelerator
        if accelerator.num_processes > 1:
            for parameter in self.parts.trained.values():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")  # type: ignore[assignment]

    def _set_learning_rate(self, k: int) -> None:
        optimizer, total = self.config.optimizer, self.config.iterations
        warm = min(1.0, (k + 1) / (optimizer.warmup + 1))
        decay = min(1.0, (total - k) / (optimizer.decay * total)) if optimizer.decay else 1.0
        for group in self.parts.optimizer.param_groups:
            group["lr"] = optimizer.lr * warm * decay
        self.metrics.add("lr", optimizer.lr * warm * decay)

    def _gather(self, values: Tensor) -> Tensor:
        accelerator = self.parts.accelerator
        if accelerator.num_processes == 1:
            return values
        return accelerator.gather(values.to(accelerator.device)).cpu()  # type: ignore[union-attr]

    def _log_scores(self, names: tuple[str, ...], values: Tensor, signal: Tensor, advantages: Tensor, ids: Tensor) -> None:
        for name, column in zip(names, values.T, strict=True):
            valid = column[~column.isnan()]
            self.metrics.add(f"score/{name}/mean", valid.mean())
            self.metrics.add(f"score/{name}/std", valid.std(correction=0) if len(valid) else torch.nan)
        self.metrics.add("signal/mean", signal)
        spread = torch.stack([advantages[ids == i].abs().amax() for i in ids.unique()])
        self.metrics.add("advantage/zero_std_groups", (spread == 0).float())
        self.metrics.add("advantage/abs_mean", advantages.abs())
        self.metrics.add("unique_prompts", len(ids.unique()))

    def _log_missing(self, scores: Scores, missing: Tensor, silent: Tensor, signal: Tensor) -> None:
        """Counts; those of the whole table are divided by the processes, whose sum is taken."""
        world = self.parts.accelerator.num_processes
        for name, lacking, groups in zip(scores.names, missing.sum(0) / world, silent / world, strict=True):
            self.metrics.update({f"score/{name}/missing": lacking, f"score/{name}/silent_groups": groups})
        self.metrics.update({"samples/not_finite": scores.not_finite, "samples/no_signal": signal.isnan().sum() / world})

    def _finish(self, k: int, trajectory: Trajectory) -> dict[str, float]:
        window = trajectory.dynamics.window
        if isinstance(self.parts.choices.window, ProbingWindow):
            self.parts.choices.window.count(window)
        if len(window):
            self.metrics.update({"window/first": window.start, "window/last": window.stop - 1})
        self.metrics.update({"samples": len(trajectory.rows), "calls/rollout": trajectory.calls})
        values = self.metrics.reduce(self.parts.accelerator)
        if self.parts.accelerator.is_main_process:
            self.metrics.write(k, values)
        return values

    def _check_stop(self) -> None:
        if self._agreed_stop():
            raise Interrupted

    def _agreed_stop(self) -> bool:
        accelerator = self.parts.accelerator
        if accelerator.num_processes == 1:
            return self.stop_asked
        return bool(self._gather(torch.tensor([self.stop_asked])).any())

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.metrics.add(f"seconds/{name}", time.perf_counter() - start)
