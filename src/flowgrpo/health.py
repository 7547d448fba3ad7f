"""Signs that a run is breaking, read from its own metrics: too far in one iteration, or worse than at the start.

The start is the base model's: in the first iteration nothing has been learnt, in the next two hardly anything. How far a mean
may drift is said in standard deviations that single samples had then. The limits were set on the embedded world, between
runs with their recipe's learning rate and with ten times as much, and runs that broke late.
"""

from collections.abc import Callable, Mapping, Sequence
from math import nan
from statistics import fmean, median
from typing import Any

from flowgrpo.canaries import CANARIES
from flowgrpo.config import HealthConfig, RunConfig

FIRST, LAST = 3, 3  # iterations that are the start, and the latest ones that are held against it
Values = Mapping[str, float]


class Unhealthy(RuntimeError):
    """The run looks broken, and its config says to stop then; it was saved."""


class Health:
    """Looks at every iteration's metrics and says once what is wrong with them. `limits`: what a healthy run stays within."""

    def __init__(self, objective: Any, rewards: Sequence[str], monitors: Sequence[str], limits: HealthConfig) -> None:
        self.objective, self.rewards, self.monitors, self.limits = objective, tuple(rewards), tuple(monitors), limits
        self.rows: list[Values] = []
        self.start: list[Values] = []
        self.said: set[str] = set()
        self.since: dict[str, int] = {}  # by what drifts, the iteration in which it had gone half of what it may
        self.looks = 0

    def look(self, values: Values) -> list[str]:
        """What has gone wrong in this iteration that had not before, a line for each sign."""
        self.rows = [*self.rows, values][-LAST:]
        if len(self.start) < FIRST:
            self.start.append(values)
        for name, (_, _, limit) in self._watched().items():
            if self._gone(name) > limit / 2:
                self.since.setdefault(name, self.looks)
            else:
                self.since.pop(name, None)
        self.looks += 1
        found = {name: message for name, sign in self._signs().items() if (message := sign())}
        new = [message for name, message in found.items() if name not in self.said]
        self.said |= found.keys()
        return new

    def _signs(self) -> dict[str, Callable[[], str | None]]:
        signs: dict[str, Callable[[], str | None]] = {
            "stride": self._stride,
            "pace": self._pace,
            "error": self._error,
            "diversity": self._diversity,
        }
        signs |= {name: lambda name=name: self._canary(name) for name in CANARIES}
        signs |= {f"tau of {name}": lambda name=name: self._against(name) for name in self.rewards}
        return signs | {f"fall of {name}": lambda name=name: self._fall(name) for name in (*self.rewards, *self.monitors)}

    def _watched(self) -> dict[str, tuple[str, str, float]]:
        """What may drift: the metrics of its mean and its standard deviation, and how far."""
        canaries = {name: (f"canary/{name}", f"canary/{name}/std", self.limits.canary) for name in CANARIES}
        rewards = (*self.rewards, *self.monitors)
        return canaries | {f"fall of {r}": (f"score/{r}/mean", f"score/{r}/std", self.limits.fall) for r in rewards}

    def _gone(self, name: str) -> float:
        """How far a canary has drifted or a reward has fallen, in standard deviations of the start; NaN if not known."""
        mean, std, _ = self._watched()[name]
        spread = _mean(self.start, std)
        if len(self.rows) < LAST or not spread > 0:
            return nan
        drift = (_mean(self.rows, mean) - _mean(self.start, mean)) / spread
        return abs(drift) if name in CANARIES else -drift

    def _path(self, name: str) -> str:
        """From where to where something has drifted, how far and since when."""
        mean = self._watched()[name][0]
        return (
            f"from {_mean(self.start, mean):.3g} to {_mean(self.rows, mean):.3g}, {self._gone(name):.2g} standard "
            f"deviations of the start, half of it by iteration {self.since.get(name, self.looks - 1)}"
        )

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

    def _pace(self) -> str | None:
        """The policy keeps going far. The first iteration does not count: AdamW's first steps are large."""
        paces = [row["moved"] / error for row in self.rows if (error := self._matching_error(row)) and "moved" in row]
        if (
            "stride" not in self.said
            and self.looks > LAST
            and len(paces) == LAST
            and (pace := median(paces)) > self.limits.pace
        ):
            return (
                f"the policy moves far in every iteration: the median of moved is {pace:.2g} of the matching error in "
                f"the last {LAST} (at most {self.limits.pace:g} in a healthy run); lower optimizer.lr"
            )
        return None

    def _clip_range(self) -> float | None:
        return self.objective.clip_range if self.objective.family == "ratio" else None

    def _matching_error(self, values: Values) -> float | None:
        """The unit of `moved`, unless the old policy lags behind by more than an iteration."""
        return None if getattr(self.objective, "old_decay", 0) else values.get("matching_error")

    def _fall(self, reward: str) -> str | None:
        """A score is lower than it was: one that is trained on, or a monitor, which is what the others are paid with."""
        name = f"fall of {reward}"
        if not self._gone(name) > self.limits.fall:
            return None
        if reward in self.monitors:
            return (
                f"{reward}, which is not trained on, has fallen {self._path(name)}: those that are may be exploited; look "
                "at the samples, weigh the rewards anew, resume from an earlier checkpoint"
            )
        return (
            f"{reward} has fallen {self._path(name)}: the model is breaking or the rewards conflict; look at the samples, "
            "lower optimizer.lr, resume from an earlier checkpoint"
        )

    def _against(self, reward: str) -> str | None:
        """Advantages order the samples of a prompt against a reward, which will fall: the earliest sign of a conflict.

        Of a monitor tau is noise where few groups tell its samples apart.
        """
        tau = _mean(self.rows, f"score/{reward}/tau")
        if len(self.rows) == LAST and tau < -self.limits.against:
            return (
                f"training works against {reward}: Kendall's tau of advantages and its scores is {tau:.2g} in the last {LAST} "
                "iterations; weigh the rewards anew, or remove it"
            )
        return None

    def _error(self) -> str | None:
        """The model no longer matches its own samples."""
        before, now = _mean(self.start, "matching_error"), _mean(self.rows, "matching_error")
        if len(self.rows) == LAST and now > self.limits.error * before > 0:
            return (
                f"the matching error has grown from {before:.3g} to {now:.3g}: the model no longer matches its own samples; "
                "lower optimizer.lr, or hold it with objective.kl"
            )
        return None

    def _diversity(self) -> str | None:
        """The samples of a prompt have become one."""
        before, now = (_mean(rows, "canary/group_diversity") for rows in (self.start, self.rows))
        if len(self.rows) == LAST and now < self.limits.diversity * before:
            return (
                f"the samples of a prompt differ by {now:.2g} in their latents, at the start it was {before:.2g}: the model "
                "makes one sample of each prompt; hold it with objective.kl, lower optimizer.lr, or go back to a checkpoint"
            )
        return None

    def _canary(self, name: str) -> str | None:
        """The pictures are no longer like those of the start."""
        if not self._gone(name) > self.limits.canary:
            return None
        return (
            f"{name.replace('_', ' ')} of the samples has gone {self._path(name)}: look at them, the model is breaking or a "
            "reward is exploited; lower optimizer.lr, weigh the rewards anew, resume from an earlier checkpoint"
        )


def health_of(config: RunConfig, objective: Any) -> Health:
    """The health of a configured run."""
    rewards, monitors = ([r.name for r in config.rewards if bool(r.weight) == trained] for trained in (True, False))
    return Health(objective, rewards, monitors, config.health)


def _mean(rows: Sequence[Values], name: str) -> float:
    found = [row[name] for row in rows if row.get(name, float("nan")) == row.get(name)]
    return fmean(found) if found else nan
