"""The denoising MDP as a diffusers scheduler.

Put in place of a pipeline's scheduler, it makes the pipeline's own ``__call__`` a rollout or a replay: it holds the plan's
levels whatever is asked of `set_timesteps`, and in `step` turns the (guided) network output into a prediction, takes a
stochastic or a deterministic step, and records the window.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.discrete import ddim_scheduler, is_discrete, velocity
from flowgrpo.schedule import Grid
from flowgrpo.solvers import Euler, Solver
from flowgrpo.transitions import FlowSde, Gaussian, Prediction, Transition, law

Noise = Callable[[int, tuple[int, ...]], Tensor]  # (step, shape) -> standard normal


@dataclass(frozen=True)
class Plan:
    """What one run does: the steps `first` to `last` - 1 of a grid, stochastic where `window` says so.

    Before the window moves `solver`, behind it `tail`. With `noise` a window step samples; with `x_next` it scores that
    stored latent instead.
    """

    grid: Grid
    first: int
    last: int
    window: range
    transition: Transition
    solver: Solver
    tail: Solver
    noise: Noise | None = None
    x_next: Tensor | None = None

    def solver_at(self, step: int) -> Solver | None:
        """What moves a step; None inside the window."""
        if step in self.window:
            return None
        return self.tail if step >= self.window.stop > 0 else self.solver

    def calls(self, step: int) -> int:
        """Network calls of a step."""
        solver = self.solver_at(step)
        return 1 if solver is None else solver.calls(self.grid.sigmas, step)

    @property
    def levels(self) -> list[int]:
        """The level that each network call is made at, by index."""
        return [step + (call > 0) for step in range(self.first, self.last) for call in range(self.calls(step))]

    @property
    def timesteps(self) -> Tensor:
        """What the network is given at each of its calls."""
        return self.grid.timesteps[self.levels]

    def advance(
        self, step: int, predictions: Sequence[Prediction], previous: Prediction | None
    ) -> tuple[Tensor, Gaussian | None]:
        """The next latent, and the step's law where it is stochastic."""
        solver, sigmas = self.solver_at(step), self.grid.sigmas
        if solver is not None:
            return solver.step(predictions, sigmas, step, previous), None
        gaussian = law(self.transition, predictions[0], sigmas, step)
        if self.x_next is not None:
            return self.x_next, gaussian
        assert self.noise is not None, "a window step needs noise to sample or a latent to score"
        noise = self.noise(step, tuple(gaussian.mean.shape)).to(gaussian.mean.device)
        return gaussian.sample(noise), gaussian


def one_call(grid: Grid) -> Plan:
    """A single step that is made for what the network says at its level; where it leads to is nobody's matter."""
    return Plan(grid, 0, 1, range(0), FlowSde(), Euler(), Euler())


@dataclass
class Record:
    """What a run left behind: the latents around the window, its laws, the last prediction and the last latent."""

    latents: dict[int, Tensor] = field(default_factory=dict)
    laws: dict[int, Gaussian] = field(default_factory=dict)
    predictions: dict[int, Prediction] = field(default_factory=dict)
    x: Tensor | None = None
    calls: int = 0

    @property
    def last(self) -> Tensor:
        """The latent after the last step."""
        assert self.x is not None, "the pipeline made no step"
        return self.x


class MDPScheduler:
    """Mixed into the pipeline's own scheduler class by `mdp_scheduler`."""

    plan: Plan
    record: Record

    def begin(self, plan: Plan) -> Record:
        """Take up a plan; the returned record fills as the pipeline runs."""
        self.plan, self.record = plan, Record()
        return self.record

    def set_timesteps(self, num_inference_steps: int | None = None, device: Any = None, sigmas: Any = None,
                      mu: float | None = None, timesteps: Any = None, **_: Any) -> None:  # fmt: skip
        """Lay out the plan's levels; what the pipeline asks for is already in them."""
        plan = self.plan
        levels = [*plan.levels, plan.last]  # one a call, and the end: some pipelines look a call's level up by its number
        self.sigmas = torch.tensor([plan.grid.sigmas[level] for level in levels], dtype=torch.float32)
        self.timesteps = plan.timesteps.to(device)
        self.num_inference_steps = len(self.timesteps)
        self._position, self._step_index, self._begin_index = plan.first, None, None
        self._made: list[Prediction] = []
        self._previous: Prediction | None = None

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        """One network call's share of a step of the MDP, in float32."""
        step, plan = self._position, self.plan
        self._made.append(self._prediction(model_output.float(), sample.float(), step + bool(self._made)))
        x_next, gaussian = plan.advance(step, self._made, self._previous)
        self.record.x = x_next
        self.record.calls += 1
        if len(self._made) == plan.calls(step):
            self._keep(step, self._made[0], gaussian)
            self._previous, self._made, self._position = self._made[0], [], step + 1
        sample = x_next if plan.grid.scales is None else plan.grid.scale(step + 1) * x_next
        return SimpleNamespace(prev_sample=sample) if return_dict else (sample,)

    def _prediction(self, output: Tensor, sample: Tensor, level: int) -> Prediction:
        grid = self.plan.grid
        if grid.scales is None:
            return Prediction(sample, output, grid.sigmas[level])
        sigma, scale, kind = grid.sigmas[level], grid.scale(level), self.config["prediction_type"]  # type: ignore[attr-defined]
        return Prediction(sample / scale, velocity(output, sample / scale, sigma, scale, kind), sigma)

    def _keep(self, step: int, prediction: Prediction, gaussian: Gaussian | None) -> None:
        if gaussian is not None:
            self.record.laws[step] = gaussian
        if gaussian is not None or step - 1 in self.plan.window or step == self.plan.first:
            self.record.latents[step] = prediction.x.detach()
        if step == self.plan.last - 1:
            self.record.predictions[step] = prediction


def mdp_scheduler(original: Any) -> Any:
    """A scheduler of the original's class that runs plans; of DDIM's where the model has discrete levels.

    Raises ValueError for a scheduler that is neither a flow's nor one with discrete levels.
    """
    if is_discrete(original):
        original = ddim_scheduler(original)
    elif not hasattr(original, "sigmas") or original.config.get("prediction_type", "flow_prediction") != "flow_prediction":
        raise ValueError(
            "the policy must be a flow-matching pipeline or one with discrete levels (epsilon, v or data prediction), got "
            f"{type(original).__name__} with prediction_type={original.config.get('prediction_type')!r}"
        )
    return type(f"MDP{type(original).__name__}", (MDPScheduler, type(original)), {}).from_config(original.config)
