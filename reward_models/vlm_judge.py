"""A vision-language model as a judge, behind any server that speaks OpenAI's chat completions."""

import base64
import io
import json
import math
import re
import threading
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, get_args

import torch
from PIL import Image
from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.media import to_uint8
from reward_models._http import Servers, json_of
from reward_models.frames import places

Answer = Literal["yes", "scale", "better"]
QUESTIONS: dict[str, str] = {
    "yes": 'Does this show "{prompt}", in all that it says? Answer with one word, yes or no.',
    "scale": (
        'How well does this show "{prompt}"? Say shortly what fits and what does not, then end with a line "Score: n", n a '
        "whole number from 1 (not at all) to 5 (in all that it says)."
    ),
    "better": 'Two attempts to show "{prompt}", first A, then B. Which one shows it better? Answer with one letter, A or B.',
}
WORDS: dict[str, tuple[str, str]] = {"yes": ("yes", "no"), "better": ("a", "b")}
LENGTHS = {"yes": 1, "better": 1, "scale": 512}  # tokens of an answer
SCORE = re.compile(r"^\W*score\W*([1-5])\W*$", re.IGNORECASE)


class VlmJudge:
    """Asks a model about each sample and its prompt, or about each pair of samples.

        yes     P(yes) / (P(yes) + P(no)) of the first token, from the server's log-probabilities; in [0, 1]
        scale   (n - 1) / 4 of the line "Score: n" that the answer must end with; in [0, 1]
        better  P(A) / (P(A) + P(B)) of the first token: a judge of pairs, who is shown both orders unless told otherwise

    `question` is a text with {prompt} in it; by default one for whether the sample shows the prompt, in our words. Of a film
    `frames` pictures are shown, spread evenly over time. At most `concurrency` requests are under way at a time. An answer that
    does not say what was asked is NaN, as is one that has neither word among its likeliest; a server's refusal raises.

    `urls` end before /chat/completions, usually in /v1; how they are asked: see `Servers`. `usage` counts requests, tokens and
    seconds. Raises ImportError without httpx, ValueError for a setting.

    Source: P(yes) from log-probabilities is VQAScore's (2404.01291); the texts are ours.
    """

    takes = "media"
    needs_motion = False
    range: tuple[float, float] | None = (0.0, 1.0)

    def __init__(self, urls: Sequence[str] | str, model: str, answer: Answer = "yes", question: str | None = None,
                 frames: int = 4, concurrency: int = 16, token_env: str = "OPENAI_API_KEY", timeout_s: float = 120.0,
                 retries: int = 4, wait_s: float = 0.5) -> None:  # fmt: skip
        if answer not in get_args(Answer):
            raise ValueError(f"answer must be one of {', '.join(get_args(Answer))}, got {answer!r}; choose one")
        self.question = QUESTIONS[answer] if question is None else question
        if "{prompt}" not in self.question:
            raise ValueError(f"question must say where the prompt stands, with {{prompt}}, got {self.question!r}")
        if frames < 1 or concurrency < 1:
            raise ValueError(f"frames and concurrency must be at least 1, got {frames} and {concurrency}")
        self.servers = Servers(urls, token_env=token_env, timeout_s=timeout_s, retries=retries, wait_s=wait_s)
        self.model, self.answer, self.frames, self.concurrency = model, answer, frames, concurrency
        self.compares = answer == "better"
        self.unit = {"yes": "probability of yes", "scale": "share of the scale", "better": "probability"}[answer]
        self.usage: Counter[str] = Counter()
        self._lock = threading.Lock()

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1], or of pairs (b, 2, f, 3, h, w)."""
        with ThreadPoolExecutor(self.concurrency) as pool:
            return torch.tensor(list(pool.map(self._ask, media, prompts)))

    def _ask(self, sample: Tensor, prompt: Prompt) -> float:
        shown = [(name, clip) for name, clip in zip("AB", sample, strict=True)] if self.compares else [("", sample)]
        parts: list[dict[str, Any]] = []
        for name, clip in shown:
            parts += [{"type": "text", "text": f"{name}:"}] if name else []
            parts += [_picture(clip[i]) for i in places(len(clip), self.frames)]
        parts.append({"type": "text", "text": self.question.replace("{prompt}", prompt.text)})
        asked: dict[str, Any] = {
            "model": self.model,
            "messages": [{"role": "user", "content": parts}],
            "max_tokens": LENGTHS[self.answer],
            "temperature": 0,
        }
        if self.answer in WORDS:
            asked |= {"logprobs": True, "top_logprobs": 20}
        body, what = json.dumps(asked).encode(), f"a question of {self.model}"
        response = self.servers.post("/chat/completions", body, "application/json", what)
        answer = json_of(response)
        self._count(answer, response.elapsed.total_seconds())
        return self._score(answer)

    def _score(self, answer: Any) -> float:
        try:
            choice = answer["choices"][0]
            if self.answer in WORDS:
                return preference(choice["logprobs"]["content"][0]["top_logprobs"], *WORDS[self.answer])
            text = choice["message"]["content"]
        except (KeyError, IndexError, TypeError) as error:
            said = json.dumps(answer)[:200]
            raise ValueError(f"{self.model} must answer as chat completions do, lacking {error}, got {said}") from error
        found = SCORE.match(str(text).rstrip().rpartition("\n")[2])
        return (int(found[1]) - 1) / 4 if found else math.nan

    def _count(self, answer: Any, seconds: float) -> None:
        used = answer.get("usage") if isinstance(answer, dict) else None
        with self._lock:
            self.usage["requests"] += 1
            self.usage["seconds"] += seconds  # type: ignore[assignment]
            for kind in ("prompt_tokens", "completion_tokens"):
                self.usage[kind] += (used or {}).get(kind) or 0


def preference(likely: Sequence[Any], first: str, second: str) -> float:
    """P(first) / (P(first) + P(second)) of tokens and their log-probabilities, however they are written; NaN without both."""
    mass = {first: 0.0, second: 0.0}
    for one in likely:
        word = str(one["token"]).strip().strip(".,\"'*").lower()
        if word in mass:
            mass[word] += math.exp(float(one["logprob"]))
    total = sum(mass.values())
    return mass[first] / total if total > 0 else math.nan


def _picture(frame: Tensor) -> dict[str, Any]:
    buffer = io.BytesIO()
    Image.fromarray(to_uint8(frame).numpy()).save(buffer, "PNG")
    data = base64.b64encode(buffer.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
