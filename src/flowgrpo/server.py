"""A reward server: any set of reward models behind HTTP, for runs elsewhere (`reward_models.remote`)."""

import asyncio
import hmac
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from contextlib import asynccontextmanager
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

import flowgrpo
from flowgrpo.data import Prompt
from flowgrpo.scoring import Scorer
from flowgrpo.wire import CONTENT_TYPE, scores_as_json, unpacked

__all__ = ["Batcher", "Limits", "app_of"]


@dataclass(frozen=True)
class Limits:
    """What a server takes: bytes of a request, samples scored together, and how long it waits for others to come."""

    max_bytes: int = 512 * 2**20
    max_batch: int = 64
    max_wait_s: float = 0.005

    def __post_init__(self) -> None:
        if self.max_bytes < 1 or self.max_batch < 1 or self.max_wait_s < 0:
            raise ValueError(f"limits must be at least 1 byte, 1 sample and 0 seconds, got {self}")


@dataclass(frozen=True)
class Task:
    """One request's samples."""

    media: Tensor
    prompts: list[Prompt]
    answer: "Future[Tensor]"


class Batcher:
    """Scores the samples of all clients, those of one size together, in a thread of its own."""

    def __init__(self, scorer: Scorer, limits: Limits) -> None:
        self.scorer, self.limits = scorer, limits
        self._tasks: SimpleQueue[Task | None] = SimpleQueue()
        self._thread = Thread(target=self._work, daemon=True)
        self._thread.start()

    def submit(self, media: Tensor, prompts: list[Prompt]) -> "Future[Tensor]":
        """The scores (b, k) that will be."""
        task = Task(media, prompts, Future())
        self._tasks.put(task)
        return task.answer

    def close(self) -> None:
        """End the thread once what is asked for is answered."""
        self._tasks.put(None)
        self._thread.join()

    def _work(self) -> None:
        left: Task | None = None
        while True:
            first = left or self._tasks.get()
            if first is None:
                return
            batch, left = self._more_like(first)
            self._answer(batch)

    def _more_like(self, first: Task) -> tuple[list[Task], Task | None]:
        """Requests that can be scored with this one, and the first that cannot."""
        batch, count, until = [first], len(first.prompts), time.monotonic() + self.limits.max_wait_s
        while count < self.limits.max_batch:
            try:
                task = self._tasks.get(timeout=max(0.0, until - time.monotonic()))
            except Empty:
                break
            if task is None:
                self._tasks.put(None)
                break
            if task.media.shape[1:] != first.media.shape[1:] or count + len(task.prompts) > self.limits.max_batch:
                return batch, task
            batch.append(task)
            count += len(task.prompts)
        return batch, None

    def _answer(self, batch: list[Task]) -> None:
        try:
            prompts = [prompt for task in batch for prompt in task.prompts]
            values = self.scorer(torch.cat([task.media for task in batch]), prompts).values
        except Exception as error:
            for task in batch:
                task.answer.set_exception(error)
            return
        for task, part in zip(batch, values.split([len(task.prompts) for task in batch]), strict=True):
            task.answer.set_result(part)


class Refused(Exception):
    """A request that is not served: an HTTP status and what to do."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def app_of(scorer: Scorer, token: str | None, limits: Limits | None = None) -> Any:
    """An ASGI app with /health, /score and /metrics. With a `token` the last two want it as a bearer token.

    Raises ImportError without FastAPI.
    """
    try:
        from fastapi import FastAPI, Request, Response
        from fastapi.concurrency import run_in_threadpool
        from fastapi.responses import JSONResponse, PlainTextResponse
    except ImportError as error:
        raise ImportError("serving needs FastAPI and uvicorn: pip install 'flowgrpo[serve]'") from error
    service = Service(scorer, limits or Limits())

    def guarded(answer: Callable[[Any], Awaitable[Any]], secret: bool) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            try:
                if secret:
                    _check_token(request.headers.get("authorization", ""), token)
                said = await answer(request)
                response = PlainTextResponse(said) if isinstance(said, str) else JSONResponse(said)
            except Refused as refused:
                response = JSONResponse({"error": str(refused)}, refused.status)
            except Exception as error:
                response = JSONResponse({"error": f"{type(error).__name__}: {error}"}, 500)
            service.counts[f"{request.url.path} {response.status_code}"] += 1
            return response

        return serve

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        yield
        await run_in_threadpool(service.batcher.close)

    app = FastAPI(title="flowgrpo rewards", version=flowgrpo.__version__, lifespan=lifespan)
    app.add_api_route("/health", guarded(service.health, False))
    app.add_api_route("/score", guarded(service.score, True), methods=["POST"])
    app.add_api_route("/metrics", guarded(service.metrics, True))
    return app


class Service:
    """What the server answers: JSON, or a text. Raises Refused."""

    def __init__(self, scorer: Scorer, limits: Limits) -> None:
        self.scorer, self.limits, self.counts = scorer, limits, Counter[str]()
        self.batcher = Batcher(scorer, limits)

    async def health(self, _: Any) -> dict[str, Any]:
        """That it is there, and what it serves."""
        rewards = {one.name: {"unit": one.traits.unit, "range": one.traits.range} for one in self.scorer.components}
        return {"status": "ok", "version": flowgrpo.__version__, "rewards": rewards}

    async def score(self, request: Any) -> dict[str, Any]:
        """The scores of what was sent."""
        if request.headers.get("content-type", "").split(";")[0].strip() != CONTENT_TYPE:
            raise Refused(415, f"the content type must be {CONTENT_TYPE}, got {request.headers.get('content-type')!r}")
        body, names = await _body(request, self.limits.max_bytes), self.scorer.names
        try:
            media, prompts, rewards = await asyncio.to_thread(unpacked, body)
            columns = [names.index(name) for name in rewards or names]
        except ValueError as error:
            raise Refused(422, f"{error}; there are {', '.join(names)}") from error
        try:
            values = await asyncio.wrap_future(self.batcher.submit(media, prompts))
        except ValueError as error:  # samples that a model cannot take, such as pictures where films are wanted
            raise Refused(422, str(error)) from error
        self.counts["samples"] += len(prompts)
        return scores_as_json([names[k] for k in columns], values[:, columns])

    async def metrics(self, _: Any) -> str:
        """Counters in Prometheus' text format."""
        lines = []
        for name, count in sorted(self.counts.items()):
            path, _, status = name.partition(" ")
            labels = f'{{path={json.dumps(path)},status="{status}"}}'
            lines.append(f"flowgrpo_requests_total{labels} {count}" if status else f"flowgrpo_samples_total {count}")
        for kind, by_name in (("seconds", self.scorer.seconds), ("missing", self.scorer.missing)):
            lines += [f"flowgrpo_reward_{kind}_total{{reward={json.dumps(name)}}} {n:g}" for name, n in by_name.items()]
        return "\n".join(lines) + "\n"


def _check_token(header: str, token: str | None) -> None:
    if token is None:
        return
    kind, _, given = header.partition(" ")
    if kind.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token.encode()):
        raise Refused(401, "a bearer token must come with the request, and it must be the server's")


async def _body(request: Any, max_bytes: int) -> bytes:
    """The body, read no further than it may be long."""
    announced = request.headers.get("content-length", "")
    if announced.isdigit() and int(announced) > max_bytes:
        raise Refused(413, f"a request may have {max_bytes} bytes, this one has {announced}; send fewer samples at once")
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size > max_bytes:
            raise Refused(413, f"a request may have {max_bytes} bytes, this one has more; send fewer samples at once")
        parts.append(part)
    return b"".join(parts)
