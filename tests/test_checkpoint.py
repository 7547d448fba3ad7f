"""Checkpoints that are whole or absent, and an optimizer that goes on bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import Linear, Sequential

from flowgrpo import checkpoint
from flowgrpo.checkpoint import folder_name, latest, load, optimizer_tensors, prune, restore_optimizer, save


def _save(root, iteration):
    save(
        root / folder_name(iteration),
        {"weights": {"a.b": torch.full((2, 3), float(iteration))}},
        {"iteration": iteration},
    )


def test_tensors_and_state_come_back_exactly(tmp_path):
    bits = torch.randn(3, 5)
    tensors = {"policy": {"w": bits.T, "half": bits.bfloat16(), "n": torch.tensor(7)}, "empty": {}}
    state = {"lr": 0.1 + 0.2, "nested": {"list": [1, None, "ü"]}, "tiny": 5e-324}
    save(tmp_path / "it000003", tensors, state)
    found, found_state = load(tmp_path / "it000003")
    assert found_state == state
    assert found.keys() == tensors.keys()
    for name, tensor in tensors["policy"].items():
        assert torch.equal(found["policy"][name], tensor)
        assert found["policy"][name].dtype == tensor.dtype
    assert {f.suffix for f in (tmp_path / "it000003").iterdir()} == {".safetensors", ".json"}


def test_the_latest_is_the_highest_finished_iteration(tmp_path):
    assert latest(tmp_path / "none") is None
    for iteration in (9, 10, 2):
        _save(tmp_path, iteration)
    _save(tmp_path, 1_000_000)
    (tmp_path / "it000011").mkdir()
    (tmp_path / "it000012.tmp-1").mkdir()
    (tmp_path / "notes").mkdir()
    assert latest(tmp_path) == tmp_path / "it1000000"
    assert load(latest(tmp_path))[1] == {"iteration": 1_000_000}


def test_pruning_keeps_the_latest_and_removes_broken_saves(tmp_path):
    for iteration in (5, 10, 15, 20):
        _save(tmp_path, iteration)
    (tmp_path / "it000025.tmp-1").mkdir()
    prune(tmp_path, keep=2)
    assert sorted(f.name for f in tmp_path.iterdir()) == ["it000015", "it000020"]
    with pytest.raises(ValueError, match="keep=0 must be at least 1"):
        prune(tmp_path, keep=0)


def test_saving_a_name_again_replaces_it(tmp_path):
    _save(tmp_path, 5)
    save(tmp_path / "it000005", {"other": {"c": torch.zeros(1)}}, {"again": True})
    assert load(tmp_path / "it000005") == ({"other": {"c": torch.zeros(1)}}, {"again": True})
    assert [f.name for f in tmp_path.iterdir()] == ["it000005"]


@pytest.mark.parametrize("call", ["save_file", "replace_folder", "_flush"])
def test_a_save_that_breaks_leaves_the_previous_checkpoint_in_use(tmp_path, monkeypatch, call):
    _save(tmp_path, 5)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, call, lambda *_: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            _save(tmp_path, 10)
    assert latest(tmp_path) == tmp_path / "it000005"
    _save(tmp_path, 10)
    assert latest(tmp_path) == tmp_path / "it000010"


def test_a_killed_save_leaves_the_previous_checkpoint_in_use(tmp_path):
    _save(tmp_path, 5)
    code = (
        "import os, signal, sys, torch; from pathlib import Path; from flowgrpo import checkpoint\n"
        "write, count = checkpoint.save_file, []\n"
        "def dying(*args):\n"
        "    count.append(1)\n"
        "    if len(count) == 2: os.kill(os.getpid(), signal.SIGKILL)\n"
        "    write(*args)\n"
        "checkpoint.save_file = dying\n"
        "groups = {name: {'x': torch.ones(2)} for name in 'abc'}\n"
        "checkpoint.save(Path(sys.argv[1]), groups, {})\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(checkpoint.__file__).parents[1])}
    target = str(tmp_path / "it000010")
    done = subprocess.run([sys.executable, "-c", code, target], env=environment, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [f.name for f in tmp_path.glob("it000010.tmp-*/*")] == ["a.safetensors"]
    assert load(latest(tmp_path))[1] == {"iteration": 5}
    prune(tmp_path, keep=1)
    assert [f.name for f in tmp_path.iterdir()] == ["it000005"]


def test_a_folder_that_is_no_checkpoint_or_lacks_a_file_is_refused_by_name(tmp_path):
    with pytest.raises(ValueError, match=r"must hold state\.json"):
        load(tmp_path)
    _save(tmp_path, 5)
    (tmp_path / "it000005" / "weights.safetensors").unlink()
    with pytest.raises(ValueError, match="it000005: the checkpoint lacks weights"):
        load(tmp_path / "it000005")


def _model(width=5, seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Sequential(Linear(3, width), Linear(width, 2))


def _names(model):
    return [name for name, _ in model.named_parameters()]


def _step(model, optimizer, number):
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.95), weight_decay=1e-3),
    "AdamW with amsgrad and a tensor rate": lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), amsgrad=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=1e-2),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "two groups": lambda p: torch.optim.AdamW([{"params": (q := list(p))[:1], "lr": 0.3}, {"params": q[1:]}], lr=0.1),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_resumed_optimizer_goes_on_bit_for_bit(tmp_path, make):
    model = _model()
    optimizer = make(model.parameters())
    for number in range(3):
        _step(model, optimizer, number)
    optimizer.param_groups[0]["lr"] = optimizer.param_groups[0]["lr"] * 0.7
    tensors, state = optimizer_tensors(optimizer, _names(model))
    save(tmp_path / "it000003", {"weights": dict(model.state_dict()), "optimizer": tensors}, {"optimizer": state})

    groups, saved = load(tmp_path / "it000003")
    resumed = _model(seed=1)
    resumed.load_state_dict(groups["weights"])
    again = make(resumed.parameters())
    restore_optimizer(again, _names(resumed), groups["optimizer"], saved["optimizer"])
    assert again.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert {k: type(v) for k, v in again.param_groups[0].items()} == {k: type(v) for k, v in optimizer.param_groups[0].items()}
    for number in range(3, 7):
        _step(model, optimizer, number)
        _step(resumed, again, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), resumed.parameters(), strict=True))


def test_a_snapshot_does_not_move_with_the_optimizer_it_came_from_or_went_to():
    model = _model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    _step(model, optimizer, 0)
    tensors, state = optimizer_tensors(optimizer, _names(model))
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    other = OPTIMIZERS["AdamW"](model.parameters())
    restore_optimizer(other, _names(model), tensors, state)
    _step(model, optimizer, 1)
    _step(model, other, 1)
    assert all(torch.equal(tensors[name], kept[name]) for name in kept)


def _without(mapping, key):
    return {k: v for k, v in mapping.items() if k != key}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t, s: (_without(t, "0.weight/exp_avg"), s), "missing tensor 0.weight/exp_avg"),
        (lambda t, s: ({**t, "9.weight/exp_avg": torch.zeros(1)}, s), "extra tensor 9.weight/exp_avg"),
        (lambda t, s: ({**t, "0.bias/exp_avg": torch.zeros(4)}, s), r"tensor 0.bias/exp_avg is \[4\], must be \[5\]"),
        (lambda t, s: (t, {**s, "groups": []}), "0 parameter groups saved, 1 here"),
        (lambda t, s: (t, {**s, "groups": [_without(s["groups"][0], "lr")]}), "missing setting lr"),
        (lambda t, s: (t, {**s, "groups": [{**s["groups"][0], "speed": 1}]}), "extra setting speed"),
        (lambda t, s: (t, {**s, "parameters": _without(s["parameters"], "1.bias")}), "missing parameter 1.bias"),
    ],
)
def test_an_optimizer_state_that_does_not_fit_is_refused_by_name(spoil, message):
    model = _model()
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    _step(model, optimizer, 0)
    tensors, state = spoil(*optimizer_tensors(optimizer, _names(model)))
    with pytest.raises(ValueError, match=message):
        restore_optimizer(OPTIMIZERS["AdamW"](model.parameters()), _names(model), tensors, state)


def test_the_state_of_another_model_or_order_is_refused():
    model, wider = _model(), _model(width=7)
    optimizer = OPTIMIZERS["AdamW"](model.parameters())
    tensors, state = optimizer_tensors(optimizer, _names(model))
    with pytest.raises(ValueError, match=r"parameter 0.weight is \[5, 3\], must be \[7, 3\]"):
        restore_optimizer(OPTIMIZERS["AdamW"](wider.parameters()), _names(wider), tensors, state)
    turned = torch.optim.AdamW(reversed(list(model.parameters())), lr=1e-2, betas=(0.8, 0.95))
    with pytest.raises(ValueError, match="the parameters are in another order"):
        restore_optimizer(turned, _names(model)[::-1], tensors, state)


def test_an_optimizer_that_keeps_lists_is_refused():
    model = _model()
    optimizer = torch.optim.LBFGS(model.parameters())

    def loss():
        optimizer.zero_grad()
        value = model(torch.ones(1, 3)).square().sum()
        value.backward()
        return value

    optimizer.step(loss)
    with pytest.raises(ValueError, match="must be a tensor or a scalar to be saved"):
        optimizer_tensors(optimizer, _names(model))
