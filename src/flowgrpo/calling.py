"""One call of a reward model: on its device, in its type, within its time, tried again, its answer checked."""

import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from threading import Thread
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from flowgrpo.component import Component
from flowgrpo.data import Prompt

__all__ = ["Caller", "checked"]

MAX_HANGING = 8  # calls; each holds a thread and its samples until the process ends
MAX_WAIT_S = 60.0


class Caller:
    """Calls a component's model. A call that hangs cannot be ended, only left: its thread stays until it returns.

    While `MAX_HANGING` calls hang the model is not called again, so that a run of days does not fill up with threads.
    """

    def __init__(self, component: Component) -> None:
        self.component = component
        self._left: list[Future[Any]] = []

    def __call__(self, samples: Tensor, prompts: Sequence[Prompt]) -> Float[Tensor, " b"]:
        """The scores, float32 on the CPU.

        Raises what the model raised in its last try, TimeoutError if it gave no answer in time, ValueError for an answer that
        is not one score a sample, which is not tried again.
        """
        one = self.component
        self._left = [call for call in self._left if not call.done()]
        if len(self._left) >= MAX_HANGING:
            raise TimeoutError(f"{len(self._left)} earlier calls still hang, so it is not called; mend it, or raise timeout_s")
        if one.device is not None:
            samples = samples.to(one.device)
        for attempt in range(one.retries + 1):
            try:
                answer = self._once(samples, prompts)
                break
            except Exception:
                if attempt == one.retries:
                    raise
                time.sleep(min(MAX_WAIT_S, one.retry_wait_s * 2**attempt))
        return checked(answer, len(prompts))

    def _once(self, samples: Tensor, prompts: Sequence[Prompt]) -> Any:
        seconds = self.component.timeout_s
        if seconds is None:
            return self._run(samples, prompts)
        answer: Future[Any] = Future()

        def work() -> None:
            try:
                answer.set_result(self._run(samples, prompts))
            except BaseException as error:
                answer.set_exception(error)

        Thread(target=work, daemon=True).start()
        if not wait([answer], timeout=seconds).done:
            self._left.append(answer)
            raise TimeoutError(f"no answer within {seconds:g} seconds; raise timeout_s or lower batch_size")
        return answer.result()

    def _run(self, samples: Tensor, prompts: Sequence[Prompt]) -> Any:
        """Modes belong to a thread, so they are set here; a model may sit on another device than its samples."""
        dtype = self.component.dtype
        kinds = {"cpu", samples.device.type, *(["cuda"] if torch.cuda.is_available() else [])}
        with ExitStack() as modes:
            modes.enter_context(torch.no_grad())
            for kind in filter(torch.amp.is_autocast_available, sorted(kinds)):
                low = dtype if dtype != torch.float32 else None
                modes.enter_context(torch.autocast(kind, dtype=low, enabled=low is not None))
            return self.component.model(samples, prompts)


def checked(answer: Any, count: int) -> Float[Tensor, " b"]:
    """The answer as float32 (count,) on the CPU; nothing is broadcast, squeezed or parsed. Raises ValueError for another."""
    if isinstance(answer, Tensor) and answer.is_floating_point() and answer.shape == (count,):
        return answer.detach().to("cpu", torch.float32)
    if isinstance(answer, Tensor):
        got = f"{answer.dtype} of shape {tuple(answer.shape)}"
    else:
        got = type(answer).__name__ + (f" of length {len(answer)}" if hasattr(answer, "__len__") else "")
    raise ValueError(f"it must return a float tensor of shape ({count},), one score a sample, got {got}")
