"""Any diffusers pipeline as a policy, through its own ``__call__``.

Rollout and replay both run the pipeline with our scheduler in it, so guidance, negative prompts, packing and experts are
the pipeline's own and training pictures are inference pictures.
"""

import inspect
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flowgrpo import families
from flowgrpo.data import Prompt
from flowgrpo.discrete import ddim_grid, ddim_level, is_discrete
from flowgrpo.mdp_scheduler import Plan, Record, mdp_scheduler, one_call
from flowgrpo.media import from_pipeline_output
from flowgrpo.schedule import Grid, Schedule
from flowgrpo.transitions import Prediction


@dataclass(frozen=True)
class Conditions:
    """What a pipeline call gets beside the prompts; the same in rollout and replay."""

    guidance_scale: float = 1.0
    negative_prompt: str = ""
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    call: Mapping[str, Any] = field(default_factory=dict)


class _Reached(Exception):
    """Raised at the first network call, to read the levels that the pipeline has set up by then."""


class Policy:
    """A pipeline that samples, scores stored steps, and says which levels it uses."""

    def __init__(self, pipeline: Any, conditions: Conditions, dtype: torch.dtype = torch.float32) -> None:
        self.pipeline, self.conditions, self.dtype = pipeline, conditions, dtype
        self.networks: dict[str, nn.Module] = families.policy_networks(pipeline)
        self.own_scheduler = pipeline.scheduler
        self.scheduler = mdp_scheduler(pipeline.scheduler)
        self._call = families.pipeline_call(pipeline)
        self._copies, self._guidance = families.copies_argument(pipeline), families.guidance_argument(pipeline)
        self.latent_shape: tuple[int, ...] | None = None  # of a sample at the conditions' size, once the pipeline has run
        self._start: Tensor | None = None
        self._encoded: OrderedDict[str, Any] = OrderedDict()
        self._check_conditions()
        pipeline.set_progress_bar_config(disable=True)
        self._own_prepare = pipeline.prepare_latents
        pipeline.prepare_latents = self._prepare_latents
        if hasattr(pipeline, "encode_prompt"):
            pipeline.encode_prompt = _remembered(pipeline.encode_prompt, self._encoded)

    def run(self, prompts: Sequence[Prompt], plan: Plan, *, start: Tensor | None = None,
            generators: Sequence[torch.Generator] | None = None, decode: bool = False, grad: bool = False,
            ) -> tuple[Record, Tensor | None]:  # fmt: skip
        """Run a plan for one prompt per row.

        The first latents are `start` (b, *s) or drawn by the pipeline from one generator per row. Returns the record and,
        with `decode`, media (b, f, 3, h, w) in [0, 1].
        """
        record = self.scheduler.begin(plan)
        self._start = start if start is None or plan.grid.scales is None else plan.grid.scale(plan.first) * start
        self.pipeline.scheduler = self.scheduler
        try:
            result = self._run_pipeline(prompts, len(plan.timesteps), generators, decode, grad)
        finally:
            self._start, self.pipeline.scheduler = None, self.own_scheduler
        return record, from_pipeline_output(families.output_of(result)) if decode else None

    def generate(self, prompts: Sequence[Prompt], num_steps: int, generators: Sequence[torch.Generator]) -> Tensor:
        """Plain inference with the pipeline's own scheduler: media (b, f, 3, h, w) in [0, 1]."""
        return from_pipeline_output(families.output_of(self._run_pipeline(prompts, num_steps, generators, True, False)))

    def level(self, grid: Grid, sigma: float) -> Grid:
        """A level to predict at: this one, or, for a model with discrete levels, the nearest that it knows."""
        return ddim_level(self.own_scheduler, sigma) if is_discrete(self.own_scheduler) else grid.level(sigma)

    def predict(self, prompts: Sequence[Prompt], x: Tensor, level: Grid, *, grad: bool = False) -> Prediction:
        """What the network, guided as in sampling, says of the latents x (b, *s) at a `level`."""
        record, _ = self.run(prompts, one_call(level), start=x, grad=grad)
        return record.predictions[0]

    def forget(self) -> None:
        """Let go of the encoded prompts, which are remembered from a rollout for its replays."""
        self._encoded.clear()

    def grid(self, num_steps: int, schedule: Schedule) -> Grid:
        """The levels of a run: the schedule's, or the pipeline's own for this size."""
        sigmas, discrete = schedule.sigmas(num_steps), is_discrete(self.own_scheduler)
        if discrete and sigmas is not None:
            raise ValueError("sampler.schedule: this model has discrete levels of its own; set it to pipeline")
        own = ddim_grid(self.own_scheduler, num_steps) if discrete else self._own_grid(num_steps)
        if sigmas is None:
            return own
        scale = self.own_scheduler.config.num_train_timesteps
        return Grid(sigmas, (torch.tensor(sigmas[:-1], dtype=torch.float64) * scale).to(own.timesteps.dtype))

    def _own_grid(self, num_steps: int) -> Grid:
        def stop(*_: Any) -> None:
            raise _Reached

        hooks = [network.register_forward_pre_hook(stop) for network in self.networks.values()]
        try:
            self._run_pipeline([Prompt("", 0)], num_steps, [torch.Generator().manual_seed(0)], False, False)
        except _Reached:
            pass
        finally:
            for hook in hooks:
                hook.remove()
        scheduler = self.own_scheduler
        return Grid(tuple(float(s) for s in scheduler.sigmas), scheduler.timesteps.clone().cpu())

    def _run_pipeline(self, prompts: Sequence[Prompt], num_steps: int, generators: Sequence[torch.Generator] | None,
                      decode: bool, grad: bool) -> Any:  # fmt: skip
        kinds, copies = grouped(prompts) if self._copies else (tuple(prompts), 1)
        arguments: dict[str, Any] = {
            **self._size(),
            "prompt": [p.text for p in kinds],
            "num_inference_steps": num_steps,
            "generator": list(generators) if generators else [torch.Generator() for _ in prompts],
            "output_type": "pt" if decode else "latent",
            **self._guidance_arguments(kinds),
            **({self._copies: copies} if self._copies else {}),
            **self.conditions.call,
        }
        with torch.set_grad_enabled(grad), self._precision():
            return self._call(self.pipeline, **arguments)

    def _size(self) -> dict[str, int]:
        c = self.conditions
        size = {"height": c.height, "width": c.width, "num_frames": c.num_frames}
        return {name: value for name, value in size.items() if value is not None}

    def _guidance_arguments(self, prompts: Sequence[Prompt]) -> dict[str, Any]:
        if self._guidance is None:
            return {}
        scale = self.conditions.guidance_scale
        if scale <= 1:
            return {self._guidance: scale}
        default = self.conditions.negative_prompt
        return {
            self._guidance: scale,
            "negative_prompt": [default if p.negative is None else p.negative for p in prompts],
        }

    def _check_conditions(self) -> None:
        parameters = inspect.signature(self._call).parameters
        taken = {"prompt", "negative_prompt", "num_inference_steps", "generator", "output_type", "latents", "height", "width",
                 "num_frames", "timesteps", "sigmas", "eta", self._copies, self._guidance}  # fmt: skip
        for name in self.conditions.call:
            if name in taken or name not in parameters:
                known = sorted(set(parameters) - taken - {"self"})
                raise ValueError(
                    f"model.call.{name}: must be a further argument of {type(self.pipeline).__name__}'s call, "
                    f"one of {', '.join(known)}"
                )
        if self._guidance is None and self.conditions.guidance_scale > 1:
            raise ValueError(
                f"sampler.guidance_scale={self.conditions.guidance_scale} cannot take effect: "
                f"{type(self.pipeline).__name__} has no classifier-free guidance; set it to 1"
            )
        for name, value in self._size().items():
            if name not in parameters:
                raise ValueError(f"sampler.{name} cannot take effect: {type(self.pipeline).__name__} takes no such argument")
            families.check_size(self.pipeline, name, value)

    def _precision(self) -> Any:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.pipeline._execution_device.type, dtype=self.dtype)

    def _prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
        made = self._own_prepare(*args, **kwargs)
        latents, rest = (made[0], made[1:]) if isinstance(made, tuple) else (made, None)
        self.latent_shape = tuple(latents.shape[1:])
        latents = latents.float() if self._start is None else self._start.to(latents.device)
        return latents if rest is None else (latents, *rest)


def grouped(prompts: Sequence[Prompt]) -> tuple[tuple[Prompt, ...], int]:
    """(prompts, copies): one prompt with copies where all rows are of one prompt, else every row for itself.

    Several prompts with several copies each would be fewer texts to encode, but some pipelines of diffusers (Qwen-Image in
    0.42) then pair the copies with another prompt's mask.
    """
    alike = all(p is prompts[0] for p in prompts)
    return ((prompts[0],), len(prompts)) if alike else (tuple(prompts), 1)


def _remembered(function: Callable[..., Any], memory: OrderedDict[str, Any], limit: int = 2**29) -> Callable[..., Any]:
    """Keep the last answers of a prompt encoder, which is frozen, up to `limit` bytes; no graph is kept."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        if any(isinstance(v, Tensor) for v in (*args, *kwargs.values())):
            return function(*args, **kwargs)
        key = repr((args, sorted(kwargs.items())))
        if key not in memory:
            with torch.no_grad():
                memory[key] = function(*args, **kwargs)
            while len(memory) > 1 and sum(map(_bytes, memory.values())) > limit:
                memory.popitem(last=False)
        memory.move_to_end(key)
        return memory[key]

    return remembered


def _bytes(answer: Any) -> int:
    tensors = answer if isinstance(answer, tuple | list) else (answer,)
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))
