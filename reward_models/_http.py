"""Asks servers over HTTP, again where that may help; what `remote` and `vlm_judge` share."""

import os
import time
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

PASSING = {408, 429}  # and every 5xx: worth another try
LONGEST_WAIT_S = 30.0


class Servers:
    """Servers that answer alike, asked in turn, each call beginning with the next.

    What fails on one is asked of another, at most `retries` times more, after every round of all servers with a pause of
    `wait_s` that doubles (of one server: its Retry-After, if that is longer). Time-outs, lost connections and the statuses
    408, 429 and 5xx are worth another try; any other status is an error at once.

    `token_env` names the environment variable that holds their bearer token, none if it is not set. Raises ImportError
    without httpx, ValueError for a setting.
    """

    def __init__(self, urls: Sequence[str] | str, *, token_env: str, timeout_s: float, retries: int, wait_s: float) -> None:
        try:
            import httpx
        except ImportError as error:
            raise ImportError("asking a server needs httpx: pip install 'flowgrpo[serve]'") from error
        self.urls = [url.rstrip("/") for url in ([urls] if isinstance(urls, str) else urls)]
        if not self.urls or not all(url.startswith(("http://", "https://")) for url in self.urls):
            raise ValueError(f"urls must be addresses such as http://host:8000, got {self.urls}")
        if retries < 0 or not timeout_s > 0 or wait_s < 0:
            raise ValueError(f"retries and wait_s must be 0 or more, timeout_s above 0, got {retries}, {wait_s}, {timeout_s}")
        self.retries, self.wait_s = retries, wait_s
        self._lost: Any = httpx.TransportError
        token = os.environ.get(token_env)
        headers = {"authorization": f"Bearer {token}"} if token else {}
        self._client = httpx.Client(timeout=timeout_s, headers=headers)
        self._turn = count(int(os.environ.get("RANK", "0")))

    def post(self, path: str, content: bytes, content_type: str, what: str) -> Any:
        """The answer, of status 200. Raises ValueError for another, OSError when no server answers; `what` is for messages."""
        first, failures = next(self._turn), []
        for attempt in range(self.retries + 1):
            url = self.urls[(first + attempt) % len(self.urls)]
            try:
                response = self._client.post(f"{url}{path}", content=content, headers={"content-type": content_type})
            except self._lost as error:
                failures.append(f"{url}: {type(error).__name__} {error}".strip())
                self._pause(attempt, 0.0)
                continue
            if response.status_code == 200:
                return response
            said = f"{url}: status {response.status_code} {_said(response)}".strip()
            if response.status_code not in PASSING and response.status_code < 500:
                raise ValueError(f"{what} is refused by {said}")
            failures.append(said)
            self._pause(attempt, _retry_after(response))
        raise OSError(f"no server has answered {what} in {self.retries + 1} tries: {'; '.join(failures)}")

    def _pause(self, attempt: int, asked: float) -> None:
        if attempt < self.retries:
            rounds, rest = divmod(attempt + 1, len(self.urls))
            own = self.wait_s * 2 ** (rounds - 1) if rest == 0 else 0.0
            time.sleep(min(LONGEST_WAIT_S, max(own, asked if len(self.urls) == 1 else 0.0)))


def json_of(response: Any) -> Any:
    """What a response holds. Raises ValueError if that is not JSON."""
    try:
        return response.json()
    except ValueError as error:
        raise ValueError(f"{response.url}: its answer is not JSON: {error}; got {response.text[:100]!r}") from error


def _said(response: Any) -> str:
    try:
        said = response.json()
    except ValueError:
        return response.text[:100]
    return str(said.get("error", said) if isinstance(said, Mapping) else said)[:300]


def _retry_after(response: Any) -> float:
    text = response.headers.get("retry-after", "")
    return float(text) if text.isdigit() else 0.0
