"""Signs that a run is breaking, read from its own metrics: too far in one iteration, or worse than at the start.

The limits were set on the embedded world, between runs with their recipe's learning rate and with ten times as much.
"""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from statistics import fmean
from typing import Any

from flowgrpo.canaries import CANARIES
from flowgrpo.config import HealthConfig, RunConfig

FIRST, LAST = 3, 3  # iterations that are the start, and the latest ones that are held against it
MAY_FALL = {"high_frequency"}  # noise that training cleans away is no fault
Values = Mapping[str, float]


class Unhealthy(RuntimeError):
    """The run looks broken, and its config says to stop then; it was saved."""


class Health:
    """Looks at every iteration's metrics and says once what is wrong with them. `limits`: what a healthy run stays within."""

    def __init__(self, objective: Any, rewards: Sequence[str], limits: HealthConfig) -> None:
        self.objective, self.rewards, self.limits = objective, tuple(rewards), limits
        self.rows: list[Values] = []
        self.start: list[Values] = []
        self.said: set[str] = set()

    def look(self, values: Values) -> list[str]:
        """What has gone wrong in this iteration that had not before, a line for each sign."""
        self.rows = [*self.rows, values][-LAST:]
        if len(self.start) < FIRST:
            self.start.append(values)
        found = {name: message for name, sign in self._signs().items() if (message := sign())}
        new = [message for name, message in found.items() if name not in self.said]
        self.said |= found.keys()
        return new

    def _signs(self) -> dict[str, Callable[[], str | None]]:
        signs: dict[str, Callable[[], str | None]] = {"stride": self._stride, "error": self._error}
        signs |= {name: lambda name=name: self._canary(name) for name in CANARIES}
        return signs | {f"fall of {name}": lambda name=name: self._fall(name) for name in self.rewards}

    def _stride(self) -> str | None:
        """The policy has gone too far in one iteration."""
        values, limits = self.rows[-1], self.limits
        for name, unit, limit, what in (
            ("ratio/spread", self._clip_range(), limits.spread, "the clip range"),
            ("kl_old", getattr(self.objective, "threshold", None), limits.kl_old, "the threshold"),
            ("moved", self._matching_error(values), limits.moved, "the matching error"),
        ):
            if unit and values.get(name, 0.0) > limit * unit:
                return (
                    f"the policy moves far in one iteration: {name} is {values[name]:.2g}, {values[name] / unit:.2g} of {what} "
                    f"(at most {limit:g} in a healthy run); lower optimizer.lr"
                )
        return None

    def _clip_range(self) -> float | None:
        return self.objective.clip_range if self.objective.family == "ratio" else None

    def _matching_error(self, values: Values) -> float | None:
        """The unit of `moved`, unless the old policy lags behind by more than an iteration."""
        return None if getattr(self.objective, "old_decay", 0) else values.get("matching_error")

    def _fall(self, reward: str) -> str | None:
        """A weighted score is lower than it was."""
        mean, std = f"score/{reward}/mean", f"score/{reward}/std"
        before, now, spread = self._at_start(mean), self._now(mean), self._at_start(std)
        if len(self.rows) == LAST and before - now > self.limits.fall * spread > 0:
            return (
                f"{reward} has fallen from {before:.3g} to {now:.3g}, {(before - now) / spread:.2g} standard deviations of its "
                "scores: the model is breaking or the rewards conflict; look at the samples, lower optimizer.lr, resume from "
                "an earlier checkpoint"
            )
        return None

    def _error(self) -> str | None:
        """The model no longer matches its own samples."""
        before, now = self._at_start("matching_error"), self._now("matching_error")
        if len(self.rows) == LAST and now > self.limits.error * before > 0:
            return (
                f"the matching error has grown from {before:.3g} to {now:.3g}: the model no longer matches its own samples; "
                "lower optimizer.lr, or hold it with objective.kl"
            )
        return None

    def _canary(self, name: str) -> str | None:
        """The pictures are no longer like those of the start."""
        before, now, limit = self._at_start(f"canary/{name}"), self._now(f"canary/{name}"), self.limits.canary
        low = 0 if name in MAY_FALL else before / limit
        if len(self.rows) == LAST and before > 0 and (now < low or now > before * limit):
            return (
                f"{name.replace('_', ' ')} of the samples has gone from {before:.3g} to {now:.3g} in the last {LAST} "
                "iterations: look at them, they are likely broken; lower optimizer.lr, resume from an earlier checkpoint"
            )
        return None

    def _at_start(self, name: str) -> float:
        return _mean(self.start, name)

    def _now(self, name: str) -> float:
        return _mean(self.rows, name)


def health_of(config: RunConfig, objective: Any) -> Health:
    """The health of a configured run."""
    rewards = [reward.name for reward in config.rewards if reward.weight]
    return Health(objective, rewards, config.health)


def _mean(rows: Sequence[Values], name: str) -> float:
    found = [row[name] for row in rows if row.get(name, float("nan")) == row.get(name)]
    return fmean(found) if found else nan
