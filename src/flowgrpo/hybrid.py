"""Inference in which the tuned model makes the first, noisy steps and the base it was tuned from the rest."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.policy import Policy

__all__ = ["Hybrid", "base_from", "check_hybrid", "draw", "hybrid_facts", "tuned_steps"]


@dataclass(frozen=True)
class Hybrid:
    """The tuned model for a share of the steps, its base for the others.

        k = round(share n)        steps 0 ... k - 1: tuned, steps k ... n - 1: base

    The noisy steps settle what is where, so most of the reward stays; the late ones, where a reward is hacked in texture,
    are the base's. `base()` is a context in which the policy's networks are the base. The rule is read off the released
    code; the rounding, halves to the even number, is ours.
    Source: MixGRPO (arXiv 2507.21802 v7), appendix 18.
    """

    share: float
    base: Callable[[], AbstractContextManager[None]]

    @property
    def uncut(self) -> "Hybrid":
        """The policy as it is for all steps, which are counted: what cannot be cut shows with the base, before a training."""
        return replace(self, share=1.0)


def tuned_steps(share: float, num_steps: int) -> int:
    """The number k of tuned steps. Raises ValueError for a share between 0 and 1 that leaves one of the models no step."""
    if not 0 <= share <= 1:
        raise ValueError(f"hybrid must be a share of the steps from 0 to 1, got {share:g}; correct it")
    k = round(share * num_steps)
    if 0 < share < 1 and k in (0, num_steps):
        raise ValueError(
            f"hybrid={share:g} of {num_steps} steps rounds to {k} tuned ones and would mix nothing; "
            "use more steps, another share, or 0 (base) or 1 (tuned) if that is meant"
        )
    return k


def hybrid_facts(share: float | None, num_steps: int) -> dict[str, Any] | None:
    """What a manifest or a summary says of hybrid inference."""
    return None if share is None else {"share": share, "tuned_steps": tuned_steps(share, num_steps), "num_steps": num_steps}


def check_hybrid(scheduler: Any, share: float, num_steps: int) -> None:
    """Raise ValueError for a share or a scheduler with which there is no cut after k steps."""
    tuned_steps(share, num_steps)
    if getattr(scheduler, "order", 1) != 1:
        raise ValueError(
            f"hybrid needs a scheduler with one network call a step, {type(scheduler).__name__} makes {scheduler.order}; "
            "give the pipeline another scheduler, or leave hybrid out"
        )


def draw(policy: Policy, prompts: Sequence[Prompt], num_steps: int, generators: Sequence[torch.Generator],
         hybrid: Hybrid | None) -> Tensor:  # fmt: skip
    """`policy.generate`, hybrid if that is asked for: media (b, f, 3, h, w) in [0, 1]."""
    if hybrid is None:
        return policy.generate(prompts, num_steps, generators)
    with base_from(policy.own_scheduler, tuned_steps(hybrid.share, num_steps), num_steps, hybrid.base):
        return policy.generate(prompts, num_steps, generators)


@contextmanager
def base_from(scheduler: Any, step: int, num_steps: int, base: Callable[[], AbstractContextManager[None]]) -> Iterator[None]:
    """Inside, one call of the pipeline of `num_steps` steps has the base's networks from this step on.

    It counts the steps that the scheduler completes, which every pipeline asks for through `scheduler.step`, once a step
    under guidance and with two experts as well. Raises ValueError if the call made another number of steps.
    """
    own, done = scheduler.step, 0
    with ExitStack() as stack:

        def switch() -> None:
            if done == step < num_steps:
                stack.callback(torch.clear_autocast_cache)
                stack.enter_context(base())
                torch.clear_autocast_cache()  # else autocast goes on with its copies of the tuned weights

        @wraps(own)  # pipelines look at the signature
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            result = own(*args, **kwargs)
            done += 1
            switch()
            return result

        switch()
        if "step" in vars(scheduler):
            stack.callback(setattr, scheduler, "step", own)
        else:
            stack.callback(delattr, scheduler, "step")
        scheduler.step = counted
        yield
    if done != num_steps:
        raise ValueError(
            f"hybrid needs one scheduler step for each of the {num_steps} steps, the pipeline made {done}; leave hybrid out"
        )
