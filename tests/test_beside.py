"""Scoring beside sampling: the same scores, sooner; its faults are the run's; latents need no pictures."""

import math
import threading
import time

import pytest
import torch

from flowgrpo.beside import Scoring, joined
from flowgrpo.build import build
from flowgrpo.component import Component
from flowgrpo.metrics import Metrics
from flowgrpo.rollout import Finished
from flowgrpo.scoring import Scorer, Scores
from flowgrpo.trainer import Interrupted, Trainer
from tests.reward_faults import Latents, Redder
from tests.toys import config, redness

REWARDS = [
    {"name": "red", "use": "tests.toys:redness"},
    {"name": "latent", "use": "tests.reward_faults:Latents", "weight": 0},
]
JUDGE = {"name": "judge", "use": "tests.reward_faults:Redder"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("beside")


def trainer_of(folder, **changes):
    settings = config(folder, **changes)
    return Trainer(build(settings), Metrics(folder / "metrics.jsonl"))


def seen(folder, **changes):
    """The scores of an iteration, and the trained weights after it."""
    trainer, heard = trainer_of(folder, **changes), []
    trainer.on_samples = lambda k, trajectory, scores: heard.append(scores)
    trainer.iteration(0)
    return heard[0], [parameter.detach().clone() for parameter in trainer.parts.trained.values()]


@pytest.mark.parametrize("changes", [{"rewards": REWARDS}, {"rewards": [JUDGE, *REWARDS], "signal": "win_rate"}])
def test_an_iteration_is_the_same_whether_scored_beside_or_after(folder, changes):
    (after, weights), (beside, others) = (seen(folder, scoring__overlap=overlap, **changes) for overlap in (False, True))
    for name in ("values", "was_asked", "judged"):
        mine, other = getattr(after, name), getattr(beside, name)
        assert (mine is None) == (other is None)
        if mine is not None:
            torch.testing.assert_close(mine, other, rtol=0, atol=1e-6, equal_nan=True)
    assert beside.not_finite == 0
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-6)


def test_a_scorer_as_slow_as_the_sampler_costs_at_most_a_tenth(folder, monkeypatch):
    trainer, batches, seconds = trainer_of(folder, prompts_per_iteration=4, group_size=5, sampler__batch_size=1), 20, 0.1
    run = trainer.parts.policy.run

    def waiting(prompts, plan, **options):  # as for a device: what is measured must not hang on this machine's cores
        time.sleep(seconds if options["decode"] else 0)
        return run(prompts, plan, **options)

    def slow(media, prompts):
        time.sleep(seconds)
        return redness(media, prompts)

    def timed(beside):
        with Scoring(Scorer([Component("slow", slow, 1.0)]), beside, 5) as scoring:
            start = time.perf_counter()
            trajectory = trainer.rollout(0, scoring.take)
            sampled = time.perf_counter() - start
            assert scoring.of(trajectory).values.isfinite().sum() == batches
            return sampled, time.perf_counter() - start

    trainer.rollout(0)  # encodes the prompts
    monkeypatch.setattr(trainer.parts.policy, "run", waiting)
    (sampled, whole), (beside, all_in_all) = timed(False), timed(True)
    assert min(sampled, beside) >= batches * seconds
    assert seconds <= whole - sampled  # one call scores all that is there
    assert all_in_all - beside < 0.1 * beside  # of as many calls as batches only the last is waited for


def test_what_the_scorer_raises_the_run_raises(folder):
    trainer = trainer_of(folder, scoring__overlap=True, rewards=[{"name": "motion", "use": "tests.test_beside:Moves"}])
    with pytest.raises(ValueError, match="reward 'motion' measures motion and needs at least 2 frames"):
        trainer.iteration(0)


class Moves:
    needs_motion = True

    def __call__(self, media, prompts):
        return redness(media, prompts)


def test_a_stop_while_sampling_leaves_the_rest_unscored(folder, monkeypatch):
    trainer = trainer_of(folder, scoring__overlap=True)
    calls, began, hold, take = [], threading.Event(), threading.Event(), Scoring.take

    def slow(media, prompts):
        calls.append(len(prompts))
        began.set()
        hold.wait(30)
        return redness(media, prompts)

    def taken(self, done):
        take(self, done)
        assert began.wait(30)

    def stop_once_began():
        if began.is_set():
            raise Interrupted

    trainer.parts.scorer._callers["red"].component = Component("red", slow, 1.0)
    monkeypatch.setattr(Scoring, "take", taken)
    monkeypatch.setattr(trainer, "_check_stop", stop_once_began)
    with pytest.raises(Interrupted):
        trainer.iteration(0)
    hold.set()
    assert calls == [3]


def test_latents_alone_need_no_pictures_unless_they_are_shown(folder):
    latent = [{"name": "latent", "use": "tests.reward_faults:Latents"}]
    trainer = trainer_of(folder, rewards=latent)
    trajectory = trainer.rollout(0)
    assert trajectory.media is None
    values = trainer.iteration(0)
    assert math.isfinite(values["score/latent/mean"])
    assert "canary/contrast" not in values
    shown = trainer_of(folder, rewards=latent, logging__samples_every=2)
    assert shown.rollout(0).media is not None
    assert shown.rollout(1).media is None


def test_groups_wait_for_their_last_sample_before_a_judge_is_asked(folder):
    trainer = trainer_of(folder)
    trajectory, asked = trainer.rollout(0), []

    class Counting(Redder):
        def __call__(self, pairs, prompts):
            asked.append(len(prompts))
            return super().__call__(pairs, prompts)

    scorer = Scorer([Component("judge", Counting(), 1.0), Component("latent", Latents(), 0.0)])
    with Scoring(scorer, True, 4) as scoring:
        for i in (0, 4, 1, 5, 2, 6, 3, 7):
            scoring.take(Finished((trajectory.rows[i],), trajectory.clean[[i]], trajectory.media[[i]]))
        scores = scoring.of(trajectory)
    assert asked == [12, 12]
    whole = scorer(trajectory.media, trajectory.prompts, latents=trajectory.clean)
    assert torch.equal(scores.values, whole.values)
    torch.testing.assert_close(scores.judged, whole.judged, rtol=0, atol=0, equal_nan=True)


def test_scores_are_joined_in_the_order_asked_for():
    first = Scores(("a",), torch.tensor([[1.0], [2.0]]), torch.tensor([[True], [False]]))
    second = Scores(("a",), torch.tensor([[3.0]]), None, torch.tensor([False]))
    both = joined([first, second], [2, 0, 0])
    assert both.values[:, 0].tolist() == [3, 1, 1]
    assert both.was_asked[:, 0].tolist() == [True, True, True]
    assert both.not_finite == 1
