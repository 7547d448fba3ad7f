"""Missing scores in the loop: policies on one process and on two, pictures that are not finite, latents."""

import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from flowgrpo.metrics import Metrics
from flowgrpo.scoring import RewardError
from tests.run_faults import Recorder, outcome, parts_of

ROOT = Path(__file__).parent.parent
RED = {"name": "red", "use": "tests.toys:redness"}
SHAKY = {"name": "shaky", "use": "tests.reward_faults:Silent"}
pytestmark = pytest.mark.filterwarnings("ignore:reward '.*' (failed|gave no finite score):RuntimeWarning")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("faults")


@pytest.fixture(scope="module")
def parts(folder):
    return parts_of(folder)


@pytest.fixture(scope="module")
def healthy(parts, tmp_path_factory):
    """One iteration in which nothing is missing."""
    return outcome(parts, [RED, SHAKY], tmp_path_factory.mktemp("healthy"))


@pytest.fixture(scope="module")
def cases(parts, healthy):
    """Sets of rewards by name; an iteration has two groups of four, of which each of two processes makes one."""
    first, second = (parts.prompts[i].text for i in parts.group_sampler.at(0))
    reds = sorted(row[0] for row in healthy["scores"][0])
    one = {"above": (reds[-2] + reds[-1]) / 2}  # the reddest picture alone has no score
    group, batch = {"prompts": [second]}, {"above": -1.0}
    return {
        "healthy": [RED, SHAKY],
        **{f"{policy} one": [RED, {**SHAKY, "args": one, "missing": policy}] for policy in ("mask", "drop", "skip", "stop")},
        **{f"{policy} group": [RED, {**SHAKY, "args": group, "missing": policy}] for policy in ("mask", "drop", "stop")},
        **{f"{policy} batch": [RED, {**SHAKY, "args": batch, "missing": policy}] for policy in ("mask", "drop", "skip")},
        "raising": [RED, {**SHAKY, "args": {**group, "raising": True}, "missing": "drop", "batch_size": 4}],
        "monitor": [RED, {**SHAKY, "args": batch, "weight": 0}],
        "applies": [RED, {"name": "only", "use": "tests.reward_faults:OnlyFor", "args": {"prompt": first}, "missing": "stop"}],
        "latents": [{"name": "latent", "use": "tests.reward_faults:Latents"}],
        "judge": [{"name": "judge", "use": "tests.reward_faults:Redder"}, {**RED, "weight": 0}],
    }


@pytest.fixture(scope="module")
def alone(parts, cases, tmp_path_factory):
    """The outcome of each case in this process."""
    return {name: outcome(parts, rewards, tmp_path_factory.mktemp("alone")) for name, rewards in cases.items()}


@pytest.fixture(scope="module")
def ranks(folder, cases, tmp_path_factory):
    """The outcomes of two processes; one more case fails in one of them only."""
    out = tmp_path_factory.mktemp("ranks")
    down = {"name": "down", "use": "tests.reward_faults:DownInProcess", "args": {"rank": 1}}
    cases = cases | {f"down {policy}": [RED, {**down, "missing": policy}] for policy in ("skip", "stop")}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29741"]
    command = [*launch, str(ROOT / "tests" / "run_faults.py"), str(folder), str(out), json.dumps(cases)]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def advantages(found):
    """Of the first window step, by group."""
    return torch.tensor(found["advantages"])[:, 0].view(-1, 4)


def test_nothing_missing_counts_nothing(alone):
    metrics, own = alone["healthy"]["metrics"], advantages(alone["healthy"])
    assert [metrics[f"score/shaky/{count}"] for count in ("missing", "silent_groups")] == [0, 0]
    assert (metrics["samples/no_signal"], metrics["samples/not_finite"]) == (0, 0)
    assert (own != 0).all()


def test_a_sample_without_a_score_is_masked_and_its_siblings_train(alone):
    own, metrics = advantages(alone["mask one"]), alone["mask one"]["metrics"]
    assert (own == 0).sum() == 1
    assert own.sum(1).abs().max() < 1e-5
    assert [metrics[name] for name in ("score/shaky/missing", "score/shaky/silent_groups", "samples/no_signal")] == [1, 0, 1]


@pytest.mark.parametrize(("case", "groups"), [("drop one", 1), ("drop group", 1), ("drop batch", 2), ("raising", 1)])
def test_a_dropped_reward_leaves_the_other_alone_in_its_groups(alone, case, groups):
    own, metrics = advantages(alone[case]), alone[case]["metrics"]
    red = torch.tensor(alone["healthy"]["scores"][0])[:, 0].view(2, 4).double()
    red = (red - red.mean(1, keepdim=True)) / red.std(1, keepdim=True)
    left = (own - red).abs().amax(1) < 1e-4
    assert left.sum() == groups
    assert metrics["score/shaky/silent_groups"] == groups
    assert metrics["samples/no_signal"] == 0
    assert torch.allclose(own[~left], advantages(alone["healthy"])[~left], atol=1e-5)


@pytest.mark.parametrize("case", ["skip one", "mask group"])
def test_a_skipped_group_does_not_train_and_the_other_does(alone, case):
    own = advantages(alone[case])
    assert (own == 0).all(1).sum() == 1
    assert torch.allclose(own[(own != 0).all(1)], advantages(alone["healthy"])[(own != 0).all(1)], atol=1e-5)
    assert alone[case]["metrics"]["samples/no_signal"] == 4


@pytest.mark.parametrize("case", ["stop one", "stop group", "mask batch", "skip batch"])
def test_a_run_that_must_not_go_on_stops_with_a_checkpoint_and_says_why(alone, case):
    found = alone[case]
    assert found["advantages"] is None
    assert found["checkpoints"] == ["it000000"]
    if case.startswith("stop"):
        count = {"stop one": 1, "stop group": 4}[case]
        assert f"reward 'shaky' has no score for {count} of 8 samples (of prompt " in found["error"]
    else:
        assert "no sample has all its weighted scores" in found["error"]
        assert "red 0 of 8, shaky 8 of 8" in found["error"]
    assert "--resume" in found["error"]


def test_a_failing_monitor_changes_nothing(alone):
    own = advantages(alone["monitor"])
    assert torch.allclose(own, advantages(alone["drop batch"]), atol=1e-6)
    assert alone["monitor"]["metrics"]["score/shaky/missing"] == 8
    assert math.isnan(alone["monitor"]["metrics"]["score/shaky/mean"])


def test_where_a_reward_does_not_apply_the_others_decide_and_nothing_is_missing(alone):
    own, metrics = advantages(alone["applies"]), alone["applies"]["metrics"]
    assert torch.allclose(own[0], advantages(alone["healthy"])[0], atol=1e-5)
    assert torch.allclose(own[1], advantages(alone["drop batch"])[1], atol=1e-5)
    assert [metrics[f"score/only/{count}"] for count in ("missing", "silent_groups")] == [0, 1]


def test_a_reward_of_latents_trains_on_them(alone):
    scores = torch.tensor(alone["latents"]["scores"][0])
    assert scores.isfinite().all()
    assert scores.min() < 0  # they are no pixels
    assert (advantages(alone["latents"]) != 0).all()


def test_a_judge_of_pairs_gives_ranks(alone):
    judge, red = torch.tensor(alone["judge"]["scores"][0]).view(2, 4, 2).unbind(2)
    assert torch.equal(judge.argsort(1), red.argsort(1))
    assert torch.allclose(judge.sort(1).values, torch.tensor([0, 1, 2, 3]) / 3)
    assert torch.equal(advantages(alone["judge"]).argsort(1), red.argsort(1))


@contextmanager
def decoder_breaks(policy, bad):
    """The samples at these positions come out with one NaN or infinite pixel, in turn."""
    run, made = policy.run, []

    def broken(prompts, plan, **options):
        record, media = run(prompts, plan, **options)
        for row in range(0 if media is None else len(prompts)):
            made.append(1)
            if len(made) - 1 in bad:
                media[row, 0, 0, 0, 0] = math.nan if len(made) % 2 else math.inf
        return record, media

    policy.run = broken
    yield
    del policy.run


def trainer_in(parts, folder):
    settings = parts.config.model_copy(update={"output_dir": str(folder)})
    return Recorder(replace(parts, config=settings), Metrics(folder / "metrics.jsonl"))


@pytest.mark.parametrize("bad", [(1, 2), (1, 6)])
def test_pictures_that_are_not_finite_reach_no_reward_and_do_not_train(parts, tmp_path, bad):
    trainer = trainer_in(parts, tmp_path)
    with decoder_breaks(parts.policy, bad):
        metrics = trainer.iteration(0)
    own = torch.tensor(trainer.advantages_seen)[:, 0]
    assert (own == 0).nonzero().flatten().tolist() == list(bad)
    assert (metrics["samples/not_finite"], metrics["samples/no_signal"]) == (2, 2)
    assert (metrics["score/red/missing"], metrics["score/red/silent_groups"]) == (0, 0)
    assert metrics["score/red/mean"] > 0


def test_a_batch_without_one_finite_picture_stops_the_run_and_says_so(parts, tmp_path):
    with decoder_breaks(parts.policy, range(8)), pytest.raises(RewardError, match=r"8 samples are not finite.*--resume"):
        trainer_in(parts, tmp_path).run(1)


@pytest.mark.timeout(600)
def test_two_processes_come_to_the_same_end_as_one_and_none_hangs(ranks, alone):
    for case, one in alone.items():
        two = [rank[case] for rank in ranks]
        assert (one["error"] is None) == (two[0]["error"] is None) == (two[1]["error"] is None), case
        if one["error"] is not None:
            assert two[0]["error"].split(";")[0] == two[1]["error"].split(";")[0] == one["error"].split(";")[0]
            assert two[0]["checkpoints"] == ["it000000"]
            continue
        both = torch.tensor(two[0]["advantages"] + two[1]["advantages"])
        torch.testing.assert_close(both, torch.tensor(one["advantages"]), rtol=0, atol=2e-3)
        scores = torch.tensor(two[0]["scores"][0] + two[1]["scores"][0])
        torch.testing.assert_close(scores, torch.tensor(one["scores"][0]), rtol=0, atol=1e-3, equal_nan=True)
        counts = [name for name in one["metrics"] if name.startswith("samples") or name.endswith(("missing", "silent_groups"))]
        assert {name: two[0]["metrics"][name] for name in counts} == {name: one["metrics"][name] for name in counts}, case


@pytest.mark.timeout(600)
def test_a_reward_that_is_down_in_one_process_is_missing_for_all(ranks, alone):
    skipped = [torch.tensor(rank["down skip"]["advantages"]) for rank in ranks]
    assert (skipped[0] != 0).all()
    assert (skipped[1] == 0).all()
    errors = [rank["down stop"]["error"] for rank in ranks]
    assert all("reward 'down' has no score for 4 of 8 samples" in error for error in errors)
    assert "OSError: no connection" not in errors[0]
    assert "OSError: no connection" in errors[1]
