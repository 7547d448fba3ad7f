"""A reward model that lives on another machine, behind `flowgrpo serve`."""

from collections.abc import Sequence

from torch import Tensor

from flowgrpo.data import Prompt
from flowgrpo.wire import CONTENT_TYPE, packed, scores_from_json
from reward_models._http import Servers, json_of


class Remote:
    """Asks one of several servers for the scores of one of their rewards; how often and in which order: see `Servers`.

    An answer that is not one number or null a sample is an error at once. No score is made up: null is NaN, all else raises.
    `unit` and `range` are what the reward declares there. Raises ImportError without httpx, ValueError for a setting.
    """

    takes = "media"
    needs_motion = False

    def __init__(self, urls: Sequence[str] | str, reward: str, token_env: str = "FLOWGRPO_TOKEN", timeout_s: float = 60.0,
                 retries: int = 4, wait_s: float = 0.5, unit: str = "score",
                 range: tuple[float, float] | None = None) -> None:  # fmt: skip
        self.servers = Servers(urls, token_env=token_env, timeout_s=timeout_s, retries=retries, wait_s=wait_s)
        self.reward, self.unit, self.range = reward, unit, range

    def __call__(self, media: Tensor, prompts: Sequence[Prompt]) -> Tensor:
        """Scores (b,) of media (b, f, 3, h, w) in [0, 1]. Raises OSError when no server answers."""
        body = packed(media, prompts, [self.reward])
        answer = self.servers.post("/score", body, CONTENT_TYPE, f"reward {self.reward!r}")
        return scores_from_json(json_of(answer), self.reward, len(prompts))
