"""The moving average of the trained weights."""

import pytest
import torch
from torch.nn import Parameter

from flowgrpo.ema import Ema


def _parameters(dtype=torch.float32):
    return {"a": Parameter(torch.randn(2, 3).to(dtype)), "b": Parameter(torch.randn(5).to(dtype))}


def test_the_average_is_the_weighted_sum_of_all_weights_seen():
    parameters = _parameters()
    seen = [parameters["a"].detach().clone()]
    ema = Ema(parameters, 0.75)
    for _ in range(6):
        with torch.no_grad():
            parameters["a"].add_(1.5)
        seen.append(parameters["a"].detach().clone())
        ema.update()
    weights = [0.75**6, *(0.25 * 0.75 ** (6 - n) for n in range(1, 7))]
    torch.testing.assert_close(ema.shadow["a"], sum(w * s for w, s in zip(weights, seen, strict=True)))


def test_warm_up_starts_from_a_short_memory():
    parameter = Parameter(torch.zeros(1))
    ema = Ema({"a": parameter}, 0.99, warmup=True)
    expected = 0.0
    for n in range(50):
        parameter.data.fill_(n + 1.0)
        ema.update()
        decay = min(0.99, (1 + n) / (10 + n))
        expected = decay * expected + (1 - decay) * (n + 1)
    assert ema.shadow["a"].item() == pytest.approx(expected, rel=1e-5)


def test_the_average_never_shares_memory_with_the_weights():
    parameters = _parameters()
    ema = Ema(parameters, 0.9)
    before = ema.state_dict()
    parameters["a"].data.zero_()
    assert torch.equal(ema.shadow["a"], before["a"])
    with ema.applied():
        parameters["a"].data.fill_(7)
    assert torch.equal(ema.shadow["a"], before["a"])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_applying_the_average_gives_the_weights_back_bit_for_bit_also_after_an_error(dtype):
    parameters = _parameters(dtype)
    ema = Ema(parameters, 0.9)
    for average in ema.shadow.values():
        average.add_(1)
    own = {name: p.detach().clone() for name, p in parameters.items()}
    with ema.applied():
        assert torch.equal(parameters["b"], ema.shadow["b"].to(dtype))
    assert all(torch.equal(parameters[name], own[name]) for name in own)

    def failing():
        with ema.applied():
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        failing()
    assert all(torch.equal(parameters[name], own[name]) for name in own)
    assert all(average.dtype == torch.float32 for average in ema.shadow.values())


def test_a_saved_average_goes_on_as_if_never_stopped():
    parameters = _parameters()
    whole, first = Ema(parameters, 0.9, warmup=True), Ema(parameters, 0.9, warmup=True)
    for step in range(8):
        parameters["a"].data.add_(step)
        whole.update()
        first.update()
        if step == 3:
            saved = first.state_dict()
            first = Ema(_parameters(), 0.9, warmup=True)
            first.load_state_dict(saved)
            first.parameters = whole.parameters
    assert torch.equal(whole.shadow["a"], first.shadow["a"])
    assert first.num_updates == 8


def test_a_saved_average_of_other_weights_is_refused_by_name():
    ema = Ema(_parameters(), 0.9)
    state = ema.state_dict()
    state["c"] = state.pop("a")
    state["b"] = torch.zeros(4)
    with pytest.raises(ValueError, match=r"missing a; extra c; b is \(4,\), must be \(5,\)"):
        ema.load_state_dict(state)


@pytest.mark.parametrize("decay", [-0.1, 1.0, 1.5])
def test_a_decay_outside_zero_to_one_is_refused(decay):
    with pytest.raises(ValueError, match="must be at least 0 and below 1"):
        Ema({}, decay)
