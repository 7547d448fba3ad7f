"""The window goes where the noise of a step decides most about the reward."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from flowgrpo.window import When, last_start


@runtime_checkable
class ProbingWindow(Protocol):
    """A window that follows what is measured of the reward, and remembers it; custom ones may have any of these rules."""

    branches: int  # samples of a prompt that differ in one step's noise
    probe_prompts: int  # prompts measured at a time

    def at(self, when: When) -> range: ...

    def wants_probe(self, when: When) -> bool: ...

    def observe(self, variances: Mapping[int, float]) -> None: ...

    def count(self, window: range) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


@dataclass
class Variance:
    """Trains where the reward varies most between branches of one base path, and nowhere never.

        value_s = variance_s / max variance + exploration sqrt(log(1 + iterations so far) / (1 + times trained_s))
        start   = argmax over starts of the mean value of the window's steps

    Every `every` iterations the trainer probes: from the base path of `probe_prompts` prompts it draws `branches` samples
    that differ in the noise of one step alone, for each step but the last, and scores them. variance_s is a moving average
    of the variance within a group. The bonus of a step that is not trained grows without bound, so each gets its turn.

    Source: VR-GRPO (2506.19846, the idea: nodes of one trajectory by reward variance); the rule is ours. State: what
    was measured and how often each step was trained; it is in the checkpoint.
    """

    size: int = 4
    every: int = 10
    branches: int = 6
    probe_prompts: int = 2
    exploration: float = 0.3
    memory: float = 0.5
    variances: list[float] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = {"every": (self.every, 1), "branches": (self.branches, 2), "probe_prompts": (self.probe_prompts, 1)}
        for name, (value, least) in counts.items():
            if value < least:
                raise ValueError(f"window.{name} must be at least {least}, got {value}")
        if not self.exploration > 0:
            raise ValueError(f"window.exploration must be above 0, or steps starve; got {self.exploration}")
        if not 0 <= self.memory < 1:
            raise ValueError(f"window.memory must be in [0, 1), got {self.memory}")
        if self.variances or self.trained:
            raise ValueError("window.variances and window.trained are measured, not set; leave them out")

    def at(self, when: When) -> range:
        """The window of the present state."""
        starts = range(last_start(self.size, when.num_steps) + 1)
        values = [self._value(step, when) for step in range(when.num_steps - 1)]
        best = max(starts, key=lambda start: (sum(values[start : start + self.size]), -start))
        return range(best, best + self.size)

    def wants_probe(self, when: When) -> bool:
        """Whether the variances are to be measured before this iteration."""
        return when.iteration % self.every == 0

    def observe(self, variances: Mapping[int, float]) -> None:
        """Take up the variance measured at each step; steps that could not be measured are left out."""
        self._grow(max(variances, default=-1) + 1)
        for step, value in variances.items():
            old = self.variances[step]
            self.variances[step] = value if old < 0 else self.memory * old + (1 - self.memory) * value

    def count(self, window: range) -> None:
        """Note that these steps were trained."""
        self._grow(window.stop)
        for step in window:
            self.trained[step] += 1

    def state_dict(self) -> dict[str, Any]:
        """What was measured (-1: not yet), and the number of iterations that each step was trained in."""
        return {"variances": list(self.variances), "trained": list(self.trained)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up a `state_dict`."""
        self.variances, self.trained = list(state["variances"]), list(state["trained"])

    def _value(self, step: int, when: When) -> float:
        highest = max(self.variances, default=0.0)
        measured = self.variances[step] if step < len(self.variances) else -1.0
        share = measured / highest if measured >= 0 and highest > 0 else 1.0
        times = self.trained[step] if step < len(self.trained) else 0
        return share + self.exploration * math.sqrt(math.log(1 + when.iteration) / (1 + times))

    def _grow(self, length: int) -> None:
        self.variances += [-1.0] * (length - len(self.variances))
        self.trained += [0] * (length - len(self.trained))
