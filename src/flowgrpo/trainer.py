"""The loop: prompts, trajectory, scores, signal, advantages, loss, update."""

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from flowgrpo import run_state
from flowgrpo.adapters import gradient_norm, swapped
from flowgrpo.beside import Scoring
from flowgrpo.build import Parts
from flowgrpo.choices import when
from flowgrpo.credit import credit, gathered, learnt_rows
from flowgrpo.data import rank_slice
from flowgrpo.data_loss import data_loss
from flowgrpo.gradients import PlaceGradients
from flowgrpo.health import Unhealthy, health_of
from flowgrpo.losses import Losses, cleaned, micro_batches
from flowgrpo.metrics import Metrics, read
from flowgrpo.probe import probe
from flowgrpo.rollout import Finished, Noise, Row, Trajectory, rollout
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
        self.progress: Callable[[int], float] = lambda k: k / self.config.iterations  # the share of the run that is done
        self.on_samples: Callable[[int, Trajectory, Scores], None] = lambda *_: None
        self.on_end: Callable[[int], Mapping[str, float]] = lambda _: {}
        self.on_sign: Callable[[int, str], None] = lambda k, message: warnings.warn(f"iteration {k}: {message}", stacklevel=2)
        self.data = data_loss(parts)
        self.health = health_of(self.config, parts.choices.objective)

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
            self._look(values)
            every = self.config.checkpoint.every
            stopping = self._agreed_stop() and self.next_iteration < until
            if stopping or (every and self.next_iteration % every == 0):
                self.save()
            if stopping:
                return False
        return True

    def iteration(self, k: int) -> dict[str, float]:
        """One rollout and its updates; returns the iteration's metrics, which are also written."""
        self.parts.scorer.reset()
        with self._timed("iteration"):
            with Scoring(self.parts.scorer, self.scores_beside, self.config.group_size) as scoring:
                with self._timed("rollout"):
                    trajectory = self.rollout(k, scoring.take)
                with self._timed("score"):
                    scores = scoring.of(trajectory)
            earned = credit(self.parts, scores, trajectory, self.metrics)
            self.on_samples(k, trajectory, scores)
            self._set_learning_rate(k)
            with self._timed("update"):
                told = (earned.advantages, self.metrics, earned.gate, earned.valid)
                self.learn(Losses(self.parts, cleaned(trajectory), *told))
            self._follow(k)
        self.metrics.update(self.on_end(k))
        return self._finish(k, trajectory)

    def _look(self, values: Mapping[str, float]) -> None:
        """Say what is wrong with the iteration just done; save and raise Unhealthy where the config says so."""
        then = self.config.health.then
        signs = self.health.look(values)
        if signs and then == "stop":
            self.save()
            raise Unhealthy(f"iteration {self.next_iteration - 1}: {'; '.join(signs)} (health.then: stop; the run was saved)")
        if then == "warn" and self.parts.accelerator.is_main_process:
            for message in signs:
                self.on_sign(self.next_iteration - 1, message)

    @property
    def scores_beside(self) -> bool:
        """Whether samples are scored while others are drawn: by default not on a CPU, which both would share."""
        asked = self.config.scoring.overlap
        return self.parts.accelerator.device.type != "cpu" if asked is None else asked

    def shows(self, k: int) -> bool:
        """Whether the iteration's samples are saved as pictures."""
        every = self.config.logging.samples_every
        return bool(every) and k % every == 0

    def rollout(self, k: int, finished: Callable[[Finished], None] = lambda _: None) -> Trajectory:
        """This process's share of the iteration's samples, without media if no reward takes them and they are not shown."""
        parts, moment = self.parts, when(self.config, k)
        parts.policy.forget()
        self._check_stop()
        alone = parts.accelerator.num_processes == 1  # others may have another number of batches: they agree here only
        between = self._check_stop if alone else lambda: None
        prompts = [parts.prompts[i] for i in parts.group_sampler.at(k)]
        rows = [Row(prompt, sample) for prompt in prompts for sample in range(self.config.group_size)]
        accelerator = parts.accelerator
        mine = rank_slice(len(rows), accelerator.process_index, accelerator.num_processes)
        noise = Noise(self.config.seed, k, parts.choices.group_noise)
        size, decode = self.config.sampler.batch_size, "media" in parts.scorer.takes or self.shows(k)
        with self._sampling_weights():
            self.metrics.add("calls/probe", probe(parts, moment, between))
            dynamics = parts.dynamics(parts.choices.window.at(moment))  # which the probe may have moved
            return rollout(parts.policy, rows[mine.start : mine.stop], dynamics, noise, size, between, finished, decode)

    def learn(self, losses: Losses) -> None:
        """All updates of an iteration, each on an equal part of what this process learns from."""
        updates, count = self.config.optimizer.updates_per_iteration, self.config.optimizer.micro_batch_size
        rows = learnt_rows(self.parts, losses.advantages)
        slices = list(micro_batches(rows, len(rows) // updates))
        losses.remember([batch for part in slices[1:] for batch in micro_batches(part, count)], self._is_watched())
        for number, part in enumerate(slices):
            self.update(losses, part, number)

    def update(self, losses: Losses, rows: Sequence[int], number: int) -> None:
        """One optimizer step on `rows`: gradients are summed over micro-batches and steps or levels, then averaged."""
        parts, first = self.parts, number == 0
        watched = first and self._is_watched()
        for batch in micro_batches(rows, self.config.optimizer.micro_batch_size):
            gradients, watched = (PlaceGradients(parts.trained) if watched else None), False
            for loss, place in losses.of(batch, first):
                with nullcontext() if gradients is None else gradients.of(place):
                    (loss / len(rows)).backward()
            if gradients is not None:
                self.metrics.update(gradients.stats())
        if self.data is not None:
            for loss in self.data.pieces(losses.trajectory.noise.iteration, number, self.metrics):
                loss.backward()
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
        if self.metrics.path.is_file():
            for row in read(self.metrics.path):
                if row["iteration"] < self.next_iteration:
                    self.health.look({name: float(value) for name, value in row.items()})

    def _average_gradients(self) -> None:
        accelerator = self.parts.accelerator
        if accelerator.num_processes > 1:
            for parameter in self.parts.trained.values():
                if parameter.grad is not None:
                    parameter.grad = accelerator.reduce(parameter.grad, reduction="mean")  # type: ignore[assignment]

    def _set_learning_rate(self, k: int) -> None:
        optimizer = self.config.optimizer
        warm = min(1.0, (k + 1) / (optimizer.warmup + 1))
        decay = min(1.0, (1 - self.progress(k)) / optimizer.decay) if optimizer.decay else 1.0
        for group in self.parts.optimizer.param_groups:
            group["lr"] = optimizer.lr * warm * decay
        self.metrics.add("lr", optimizer.lr * warm * decay)

    def _is_watched(self) -> bool:
        every = self.config.logging.watch_every
        return bool(every) and self.next_iteration % every == 0

    def _follow(self, k: int) -> None:
        """Let the policy that samples and the reference follow what has been learnt."""
        parts, objective = self.parts, self.parts.choices.objective
        if parts.old is not None:
            parts.old.update(objective.old_stays(k))
        if parts.reference is not None and parts.reference.moves:
            parts.reference.follow(parts.choices.reference.stays(k, self.metrics.mean("kl", parts.accelerator)))

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

    def _sampling_weights(self) -> AbstractContextManager[None]:
        """Inside, the policy is the one that samples, where that is not the trained one."""
        old = self.parts.old
        return nullcontext() if old is None else swapped(self.parts.trained, old.shadow)

    def _check_stop(self) -> None:
        if self._agreed_stop():
            raise Interrupted

    def _agreed_stop(self) -> bool:
        accelerator = self.parts.accelerator
        if accelerator.num_processes == 1:
            return self.stop_asked
        return bool(gathered(self.parts, torch.tensor([self.stop_asked])).any())

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.metrics.add(f"seconds/{name}", time.perf_counter() - start)
