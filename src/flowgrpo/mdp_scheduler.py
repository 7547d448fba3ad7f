"""The denoising MDP as a diffusers scheduler.

Put in place of a pipeline's scheduler, it makes the pipeline's own ``__call__`` a rollout or a replay: it holds the plan's
levels whatever is asked of `set_timesteps`, and in `step` turns the (guided) network output into a prediction, takes a
stochastic or a deterministic step, and records the window.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from flowgrpo.schedule import Grid
from flowgrpo.solvers import Solver
from flowgrpo.transitions import Gaussian, Prediction, Transition, law

Noise = Callable[[int, tuple[int, ...]], Tensor]  # (step, shape) -> standard normal


@dataclass(frozen=True)
class Plan:
    """What one run does: the steps `first` to `last` - 1 of a grid, stochastic where `window` says so.

    With `noise` a window step samples; with `x_next` it scores that stored latent instead.
    """

    grid: Grid
    first: int
    last: int
    window: range
    transition: Transition
    solver: Solver
    noise: Noise | None = None
    x_next: Tensor | None = None

    def advance(self, step: int, prediction: Prediction) -> tuple[Tensor, Gaussian | None]:
        """The next latent, and the step's law where it is stochastic."""
        sigmas = self.grid.sigmas
        if step not in self.window:
            return self.solver.step(prediction, sigmas, step), None
        gaussian = law(self.transition, prediction, sigmas, step)
        if self.x_next is not None:
            return self.x_next, gaussian
        assert self.noise is not None, "a window step needs noise to sample or a latent to score"
        noise = self.noise(step, tuple(gaussian.mean.shape)).to(gaussian.mean.device)
        return gaussian.sample(noise), gaussian


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
        self.sigmas = torch.tensor(plan.grid.sigmas[plan.first : plan.last + 1], dtype=torch.float32)
        self.timesteps = plan.grid.timesteps[plan.first : plan.last].to(device)
        self.num_inference_steps = plan.last - plan.first
        self._position, self._step_index, self._begin_index = 0, None, None

    def step(self, model_output: Tensor, timestep: Any, sample: Tensor, *_: Any, return_dict: bool = True, **__: Any) -> Any:
        """One step of the MDP, in float32."""
        step = self.plan.first + self._position
        self._position += 1
        x = sample.float()
        prediction = Prediction(x, model_output.float(), self.plan.grid.sigmas[step])
        x_next, gaussian = self.plan.advance(step, prediction)
        self._keep(step, x, prediction, gaussian)
        self.record.x = x_next
        self.record.calls += 1
        return SimpleNamespace(prev_sample=x_next) if return_dict else (x_next,)

    def _keep(self, step: int, x: Tensor, prediction: Prediction, gaussian: Gaussian | None) -> None:
        if gaussian is not None:
            self.record.laws[step] = gaussian
        if gaussian is not None or step - 1 in self.plan.window or step == self.plan.first:
            self.record.latents[step] = x.detach()
        if step == self.plan.last - 1:
            self.record.predictions[step] = prediction


def mdp_scheduler(original: Any) -> Any:
    """A scheduler of the original's class that runs plans.

    Raises ValueError for a scheduler whose network does not predict a flow's velocity.
    """
    kind = original.config.get("prediction_type", "flow_prediction")
    if not (hasattr(original, "sigmas") and kind == "flow_prediction"):
        raise ValueError(
            f"the policy must be a flow-matching pipeline (its network predicts a velocity), got "
            f"{type(original).__name__} with prediction_type={kind!r}; use a flow model such as SD3, FLUX, Qwen-Image or Wan"
        )
    return type(f"MDP{type(original).__name__}", (MDPScheduler, type(original)), {}).from_config(original.config)
