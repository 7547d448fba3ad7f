"""A threshold on another reward."""

import math

import pytest
import torch

from flowgrpo.component import Traits
from flowgrpo.data import Prompt
from reward_models.gate import Gate

PROMPTS = [Prompt("a", i) for i in range(4)]
LEVEL = "tests.reward_models.test_films:Level"
MEDIA = torch.tensor([0.2, 0.5, 0.8, 0.0]).view(4, 1, 1, 1, 1).expand(4, 1, 3, 2, 2)


@pytest.mark.parametrize(("keep", "wanted"), [("below", ["1.0", "1.0", "0.0", "nan"]), ("above", ["0.0", "1.0", "1.0", "nan"])])
def test_a_score_is_on_the_right_side_or_not(keep, wanted):
    assert [str(score) for score in Gate(LEVEL, 0.5, keep)(MEDIA, PROMPTS).tolist()] == wanted
    halved = Gate(LEVEL, 0.25, keep, {"factor": 0.5})(MEDIA, PROMPTS)
    assert [str(score) for score in halved.tolist()] == wanted


def test_it_takes_what_its_model_takes():
    latents = Gate("tests.reward_faults:Latents", 0.0)
    assert Traits.of(latents) == Traits("passes", (0.0, 1.0), "latents", False)
    assert Traits.of(Gate(LEVEL, 0.5)).takes == "media"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"threshold": 1.5}, r"threshold must be a score of .*within \(0.0, 1.0\), got 1.5"),
        ({"threshold": math.nan}, "threshold must be a score"),
        ({"threshold": 0.5, "keep": "between"}, "keep must be 'below' or 'above'"),
    ],
)
def test_settings_without_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Gate(LEVEL, **options)
