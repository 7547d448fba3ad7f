"""The loop: resumed equals straight, accumulation equals one batch, many processes equal one, memory stays flat."""

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flowgrpo import checkpoint
from flowgrpo.build import build
from flowgrpo.data import Prompt
from flowgrpo.losses import Piece
from flowgrpo.metrics import Metrics, read
from flowgrpo.scoring import RewardError, Scorer
from flowgrpo.trainer import Trainer
from tests.toys import PROMPTS, config, redness, without_times

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("toy")


def trainer_of(folder, name="toy", **changes):
    settings = config(folder, name=name, **changes)
    settings.folder.mkdir(parents=True, exist_ok=True)
    return Trainer(build(settings), Metrics(settings.folder / "metrics.jsonl"))


def everything(trainer):
    """All that a run leaves: weights, optimizer, average, where it stands, its metrics."""
    tensors, state = checkpoint.optimizer_tensors(trainer.parts.optimizer, list(trainer.parts.trained))
    weights = {name: p.detach().clone() for name, p in trainer.parts.trained.items()}
    average = trainer.parts.ema.state_dict() if trainer.parts.ema else {}
    return {**weights, **tensors, **{f"ema/{n}": v for n, v in average.items()}}, state, [
        without_times(row) for row in read(trainer.metrics.path)
    ]  # fmt: skip


def assert_same_run(a, b):
    (tensors, state, rows), (other_tensors, other_state, other_rows) = everything(a), everything(b)
    assert tensors.keys() == other_tensors.keys()
    assert all(torch.equal(tensors[name], other_tensors[name]) for name in tensors)
    assert state == other_state
    assert rows == other_rows


FOLLOWING = {  # an old policy that samples and a reference that moves: both are of the run's state
    "objective": {"use": "nft", "kl": 0.01, "old_decay": 0.5, "old_ramp": 0.2},
    "reference": {"use": "average", "decay": 0.7},
}


@pytest.mark.parametrize(("train", "method"), [("lora", {}), ("full", {}), ("lora", FOLLOWING), ("full", FOLLOWING)])
def test_three_iterations_resumed_for_three_more_are_six_bit_for_bit(folder, train, method):
    changes = {"model__train": train, "ema__decay": 0.9, "objective__kl": 0.01, "optimizer__decay": 0.5, **method}
    if train == "full":
        changes["model__lora"] = {}
        changes = {"model": {**config(folder).model.model_dump(exclude={"lora"}), "train": "full"}, **changes}
        del changes["model__train"], changes["model__lora"]
    name = f"{train}-{len(method)}"
    straight = trainer_of(folder, f"straight-{name}", **changes)
    assert straight.run(6)
    first = trainer_of(folder, f"split-{name}", **changes)
    assert first.run(3)
    saved = first.save()
    second = trainer_of(folder, f"split-{name}", **changes)
    second.resume(saved)
    assert second.next_iteration == 3
    assert second.run(6)
    assert_same_run(straight, second)


def test_a_run_stopped_while_sampling_goes_on_bit_for_bit(folder):
    straight = trainer_of(folder, "straight")
    straight.run(5)
    stopped = trainer_of(folder, "stopped")

    def stop_in_the_fourth_iteration(prompts, *args, own=stopped.parts.policy.run, **kwargs):
        stopped.stop_asked |= stopped.next_iteration == 3
        return own(prompts, *args, **kwargs)

    stopped.parts.policy.run = stop_in_the_fourth_iteration
    assert not stopped.run(5)
    assert stopped.next_iteration == 3
    resumed = trainer_of(folder, "stopped")
    resumed.resume(checkpoint.latest(stopped.config.folder / "checkpoints"))
    assert resumed.run(5)
    assert_same_run(straight, resumed)


def test_a_run_stopped_while_learning_finishes_its_iteration_first(folder):
    straight, stopped = trainer_of(folder, "straight-2"), trainer_of(folder, "stopped-2")
    stopped.on_samples = lambda k, *_: setattr(stopped, "stop_asked", k == 1)
    assert not stopped.run(4)
    assert stopped.next_iteration == 2
    straight.run(2)
    assert_same_run(straight, stopped)


def gradients(folder, **changes):
    """The gradients of the first update, with plain descent so that they can be read off the weights."""
    trainer = trainer_of(folder, "gradients", optimizer__max_grad_norm=1e9, **changes)
    sgd = torch.optim.SGD(list(trainer.parts.trained.values()), lr=1.0)
    trainer.parts = replace(trainer.parts, optimizer=sgd)
    trainer._set_learning_rate = lambda k: None
    before = {name: p.detach().clone() for name, p in trainer.parts.trained.items()}
    trainer.iteration(0)
    return {name: before[name] - p.detach() for name, p in trainer.parts.trained.items()}


@pytest.mark.parametrize("size", [2, 4])
def test_accumulated_updates_equal_one_big_batch(folder, size):
    settings = {"optimizer__updates_per_iteration": 1, "sampler__window": {"use": "frozen", "size": size - 1}}
    whole = gradients(folder, optimizer__micro_batch_size=8, **settings)
    for micro in (1, 3):
        parts = gradients(folder, optimizer__micro_batch_size=micro, **settings)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-3, atol=1e-6)
    assert max(g.abs().max() for g in whole.values()) > 1e-5


@pytest.mark.parametrize(("updates", "micro"), [(1, 3), (2, 3), (4, 1)])
def test_there_are_exactly_as_many_updates_as_printed(folder, updates, micro):
    trainer = trainer_of(folder, "counted", optimizer__updates_per_iteration=updates, optimizer__micro_batch_size=micro)
    steps = []
    trainer.parts.optimizer.register_step_post_hook(lambda *_: steps.append(1))
    trainer.run(2)
    assert len(steps) == 2 * updates


def test_the_first_update_has_ratio_one_and_the_next_ones_do_not(folder):
    trainer = trainer_of(folder, "ratio")
    values = trainer.iteration(0)
    assert values["ratio/max_gap"] < 1e-6
    assert values["ratio/mean"] != 1


def test_the_toy_reward_rises(folder):
    changes = {"optimizer__lr": 3e-2, "objective__clip_range": 0.2, "group_size": 8, "sampler__group_noise": "distinct"}
    trainer = trainer_of(folder, "rises", iterations=16, **changes)
    prompts = [Prompt(text, i) for i, text in enumerate(PROMPTS)] * 4

    def red_in_plain_inference():
        generators = [torch.Generator().manual_seed(i) for i in range(len(prompts))]
        return redness(trainer.parts.policy.generate(prompts, 4, generators), prompts).mean().item()

    before = red_in_plain_inference()
    trainer.run(16)
    assert red_in_plain_inference() > before + 0.008


ALONE = {"group_size": 2, "prompts_per_iteration": 1}  # a process of two has one sample, whose siblings are elsewhere
CUT = {"group_size": 6, "sampler__batch_size": 1}  # of three processes the middle one has two prompts, the others one
LATE = {"sampler__window": {"use": "frozen", "size": 2, "start": 1}}


GROUPS = {  # what compares the samples of a group, beside a reference that moves with the mean KL of all processes
    "objective": {"use": "dgpo", "kl": 0.1}, "reference": {"use": "reset", "above": 1e-9},
    "levels": {"use": "uniform", "count": 2}, "optimizer__micro_batch_size": 4,
}  # fmt: skip


@pytest.mark.parametrize(("world", "changes"), [(2, {}), (2, {**ALONE, **LATE}), (3, {**CUT, **LATE}), (2, GROUPS)])
def test_several_processes_make_the_samples_and_the_update_of_one(folder, tmp_path, world, changes):
    outcomes = {}
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    for count in (1, world):
        out = tmp_path / str(count)
        out.mkdir()
        launch = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc_per_node",
            str(count),
            "--master_port",
            "29731",
        ]
        command = [*launch, str(ROOT / "tests" / "run_ranks.py"), str(folder), str(out), json.dumps(changes)]
        subprocess.run(command, check=True, env=environment, cwd=ROOT, capture_output=True, timeout=240)
        samples = {}
        for file in out.glob("samples*.safetensors"):
            samples |= load_file(file)
        outcomes[count] = samples, load_file(out / "weights.safetensors"), read(out / "metrics.jsonl")
    for one, two in zip(outcomes[1][:2], outcomes[world][:2], strict=True):
        assert one.keys() == two.keys()
    first = [name for name in outcomes[1][0] if name.endswith("/0")]
    assert len(first) == changes.get("group_size", 4) * changes.get("prompts_per_iteration", 2)
    for name in first:
        torch.testing.assert_close(outcomes[1][0][name], outcomes[world][0][name], rtol=0, atol=1e-6)
    for name, weight in outcomes[1][1].items():
        torch.testing.assert_close(outcomes[world][1][name], weight, rtol=0, atol=2e-3)
    same = ["score/red/mean", "samples", "unique_prompts", "advantage/abs_mean", "score/red/missing"]
    whole = changes == {}  # a group that is cut computes its prefix in each process
    for name in [*same, "calls/rollout"] if whole else same:
        assert outcomes[world][2][0][name] == pytest.approx(outcomes[1][2][0][name], abs=1e-5)


def live_tensors():
    gc.collect()
    return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())


def test_memory_is_flat_over_sixty_iterations(folder):
    trainer = trainer_of(folder, "memory", sampler__num_steps=2, sampler__window={"use": "frozen", "size": 1}, group_size=2,
                         iterations=60)  # fmt: skip
    counts = []
    trainer.run(60, lambda k, _: counts.append(live_tensors()) if k in (9, 29, 59) else None)
    assert counts[2] <= counts[0] + 5, counts


def test_a_gradient_that_is_not_finite_is_an_error_and_changes_nothing(folder, monkeypatch):
    trainer = trainer_of(folder, "nan")
    before = {name: p.detach().clone() for name, p in trainer.parts.trained.items()}

    def broken(*_):
        return [Piece(sum(p.sum() for p in trainer.parts.trained.values()) * float("nan"), None)]

    monkeypatch.setattr("flowgrpo.losses.Losses.of", broken)
    with pytest.raises(FloatingPointError, match=r"iteration 0.*not finite.*lower optimizer.lr"):
        trainer.iteration(0)
    assert all(torch.equal(p, before[name]) for name, p in trainer.parts.trained.items())


class Blind(Scorer):
    """Gives no scores."""

    def __call__(self, *args, **kwargs):
        scores = super().__call__(*args, **kwargs)
        return replace(scores, values=torch.full_like(scores.values, torch.nan))


def test_a_batch_without_any_score_stops_the_run_with_a_checkpoint(folder):
    trainer = trainer_of(folder, "unscored")
    trainer.parts = replace(trainer.parts, scorer=Blind(trainer.parts.scorer.components))
    with pytest.raises(RewardError, match=r"no sample has all its weighted scores.*red 8 of 8.*--resume"):
        trainer.run(2)
    assert checkpoint.latest(trainer.config.folder / "checkpoints").name == "it000000"


def test_a_checkpoint_of_another_sampler_is_refused(folder):
    first = trainer_of(folder, "levels")
    saved = first.save()
    other = trainer_of(folder, "levels", sampler__num_steps=5)
    with pytest.raises(ValueError, match=r"on the noise levels.*this config gives"):
        other.resume(saved)
