"""A reward model that lives on another machine, behind `flowgrpo serve`."""

import json
import os
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.wire import CONTENT_TYPE, packed, scores_from_json

PASSING = {408, 429}  # and every 5xx: worth another try
LONGEST_WAIT_S = 30.0


class Remote:
    """Asks one of several servers for the scores of one of their rewards.

    `urls` are tried in turn, each call beginning with the next; what fails on one is asked of another, at most `retries` times
    more, after every round of all servers with a pause of `wait_s` that doubles (of one server: its Retry-After, if that is
    longer). Time-outs, lost connections and the statuses 408, 429 and 5xx are worth another try; any other status, and an
    answer that is not one number or null a sample, is an error at once. No score is made up: null is NaN, all else raises.

    `token_env` names the environment variable that holds the servers' bearer token, none if it is not set. `range` is what
    the reward declares there. Raises ImportError without httpx, ValueError for a setting, OSError when no server answers.
    """

    takes = "media"
    needs_motion = False

    def __init__(self, urls: Sequence[str] | str, reward: str, token_env: str = "FLOWGRPO_TOKEN", timeout_s: float = 60.0,
                 retries: int = 4, wait_s: float = 0.5, unit: str = "score",
                 range: tuple[float, float] | None = None) -> None:  # fmt: skip
        try:
            import httpx
        except ImportError as error:
            raise ImportError("a remote reward needs httpx: pip install 'flowgrpo[serve]'") from error
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"urls must be addresses such as http://host:8000, got {self.urls}")
        if retries < 0 or not timeout_s > 0 or wait_s < 0:
            raise ValueError(f"retries and wait_s must be 0 or more, timeout_s above 0, got {retries}, {wait_s}, {timeout_s}")
        self.reward, self.retries, self.wait_s, self.unit, self.range = reward, retries, wait_s, unit, range
        self._httpx: Any = httpx
        token = os.environ.get(token_env)
        headers = {"content-type": CONTENT_TYPE} | ({"authorization": f"Bearer {token}"} if token else {})
        self._client = httpx.Client(timeout=timeout_s, headers=headers)
        self._turn = count(int(os.environ.get("RANK", "0")))

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]."""
        body, first, failures = packed(media, prompts, [self.reward]), next(self._turn), []
        for attempt in range(self.retries + 1):
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                response = self._client.post(f"{url}/score", content=body)
            except self._httpx.TransportError as error:
                failures.append(f"{url}: {type(error).__name__} {error}".strip())
                self._pause(attempt, 0.0)
                continue
            if response.status_code not in PASSING and response.status_code < 500:
                return self._read(url, response, len(prompts))
            failures.append(f"{url}: status {response.status_code} {_said(response)}".strip())
            self._pause(attempt, _retry_after(response))
        raise OSError(f"no server has scored {self.reward!r} in {self.retries + 1} tries: {'; '.join(failures)}")

    def _read(self, url: str, response: Any, number: int) -> Tensor:
        if response.status_code != 200:
            raise ValueError(f"{url} refuses {self.reward!r}: status {response.status_code} {_said(response)}")
        try:
            return scores_from_json(response.json(), self.reward, number)
        except json.JSONDecodeError as error:
            raise ValueError(f"{url}: its answer is not JSON: {error}; got {response.text[:100]!r}") from error

    def _pause(self, attempt: int, asked: float) -> None:
        if attempt < self.retries:
            rounds, rest = divmod(attempt + 1, len(self.urls))
            own = self.wait_s * 2 ** (rounds - 1) if rest == 0 else 0.0
            time.sleep(min(LONGEST_WAIT_S, max(own, asked if len(self.urls) == 1 else 0.0)))


def _said(response: Any) -> str:
    try:
        said = response.json()
    except ValueError:
        return response.text[:100]
    return str(said.get("error", said) if isinstance(said, dict) else said)[:300]


def _retry_after(response: Any) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0
