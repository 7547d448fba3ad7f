"""Numbers of an iteration: collected, reduced, written, read."""

import gc
import json
import math
import os
import subprocess
import sys
import types
import warnings
from pathlib import Path

import pytest
import torch

from flowgrpo import metrics
from flowgrpo.metrics import MAXIMA, MEANINGS, SUMS, TRACKERS, Metrics, meaning, read, truncate


def test_a_name_is_the_mean_over_all_entries_however_they_were_batched(tmp_path):
    values = torch.randn(10, 3, dtype=torch.float64)
    together, apart = Metrics(tmp_path / "m"), Metrics(tmp_path / "m")
    together.add("kl", values)
    for part in values.split([1, 2, 7]):
        apart.update({"kl": part})
    expected = values.mean().item()
    assert together.reduce()["kl"] == pytest.approx(expected, abs=1e-12)
    assert apart.reduce()["kl"] == pytest.approx(expected, abs=1e-12)


def test_nan_entries_are_left_out_and_nothing_valid_gives_nan(tmp_path):
    collected = Metrics(tmp_path / "m")
    collected.add("score/clip/mean", torch.tensor([1.0, math.nan, 3.0]))
    collected.add("score/clip/mean", math.nan)
    collected.add("score/ocr/mean", torch.tensor([math.nan]))
    collected.add("score/empty/mean", torch.zeros(0))
    values = collected.reduce()
    assert values["score/clip/mean"] == 2.0
    assert math.isnan(values["score/ocr/mean"])
    assert math.isnan(values["score/empty/mean"])
    assert collected.reduce() == {}


def test_counts_are_summed_the_largest_gap_is_kept_and_infinity_stays_visible(tmp_path):
    collected = Metrics(tmp_path / "m")
    for samples, gap in ((3, 1e-7), (4, 5e-7), (2, 2e-7)):
        collected.update({"samples": samples, "ratio/max_gap": gap, "kl": math.inf})
    assert collected.reduce() == {"samples": 9.0, "ratio/max_gap": 5e-7, "kl": math.inf}
    assert set(MEANINGS) >= SUMS | MAXIMA


class _Processes:
    """Stands for accelerate's Accelerator: gathers what each of several processes holds."""

    device = torch.device("cpu")

    def __init__(self, *held):
        self.num_processes, self._held = len(held), held

    def gather(self, tensor):
        assert tensor.dtype == torch.float64
        assert tensor.shape[0] == 1
        return torch.cat(self._held)


def test_processes_with_different_counts_give_the_mean_of_all_entries(tmp_path):
    per_process = [{"kl": [1.0, 2.0, 6.0], "samples": [3]}, {"kl": [5.0], "samples": [1]}]
    held, collections = [], []
    for content in per_process:
        collected = Metrics(tmp_path / "m")
        for name, values in content.items():
            collected.add(name, torch.tensor(values))
        collections.append(collected)
        held.append(torch.stack([collected._totals[name] for name in sorted(content)])[None])
    reduced = [collected.reduce(_Processes(*held)) for collected in collections]
    assert reduced[0] == reduced[1] == {"kl": 3.5, "samples": 4.0}


def test_a_real_accelerator_of_one_process_changes_nothing(tmp_path):
    from accelerate import Accelerator

    collected = Metrics(tmp_path / "m")
    collected.add("loss", torch.tensor([1.0, 2.0]))
    assert collected.reduce(Accelerator(cpu=True)) == {"loss": 1.5}


TWO_PROCESSES = """
import sys
from accelerate import Accelerator
from flowgrpo.metrics import Metrics
accelerator = Accelerator(cpu=True)
collected = Metrics(sys.argv[1])
for value in ([1.0, 2.0, 6.0], [5.0, float("nan")])[accelerator.process_index]:
    collected.update({"kl": value, "samples": 1, "ratio/max_gap": value})
values = collected.reduce(accelerator)
if accelerator.is_main_process:
    collected.write(0, values)
accelerator.end_training()
"""


@pytest.mark.slow
def test_two_real_processes_agree_on_mean_sum_and_maximum(tmp_path):
    script, path = tmp_path / "script.py", tmp_path / "metrics.jsonl"
    script.write_text(TWO_PROCESSES)
    environment = {**os.environ, "PYTHONPATH": str(Path(metrics.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        str(script),
        str(path),
    ]
    subprocess.run(launch, env=environment, check=True)
    assert read(path) == [{"iteration": 0, "kl": 3.5, "ratio/max_gap": 6.0, "samples": 5.0}]


def test_no_graph_is_kept_and_memory_stays_flat(tmp_path):
    collected = Metrics(tmp_path / "m")
    weight = torch.nn.Parameter(torch.ones(50))

    def live():
        gc.collect()
        return sum(issubclass(type(o), torch.Tensor) for o in gc.get_objects())

    for cycle in range(60):
        collected.add("loss", (weight * cycle).square().mean())
        if cycle == 10:
            before = live()
    assert live() == before
    assert not any(total.requires_grad for total in collected._totals.values())


def test_a_line_holds_the_iteration_first_then_sorted_names_with_exact_floats(tmp_path):
    path = tmp_path / "run" / "metrics.jsonl"
    written = {"seconds/score": 1e-300, "kl": 0.1 + 0.2, "loss": math.nan, "lr": 1 / 3}
    Metrics(path).write(4, written)
    line = path.read_text()
    assert line.startswith('{"iteration": 4, "kl": 0.30000000000000004, "loss": NaN, "lr": ')
    row = read(path)[0]
    assert list(row) == ["iteration", *sorted(written)]
    assert all(row[name] == value for name, value in written.items() if name != "loss")


@pytest.mark.parametrize("name", ["los", "score/clip", "score//mean", "score/a/b/mean", "score/<name>/median", "", "loss/"])
def test_a_name_without_a_written_meaning_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match=f"metric '{name}' has no written meaning"):
        Metrics(tmp_path / "m").add(name, 1.0)
    with pytest.raises(ValueError, match="has no written meaning"):
        Metrics(tmp_path / "m").write(0, {name: 1.0})
    assert not (tmp_path / "m").exists()


def test_every_meaning_is_a_sentence_and_is_found_for_its_own_name():
    for name, text in MEANINGS.items():
        assert meaning(name.replace("<name>", "clip_score")) == text
        assert text[0].isupper()
        assert text.endswith(".")


def test_the_page_of_metrics_is_the_table_in_the_code():
    page = Path(__file__).parents[1] / "docs" / "metrics.md"
    assert page.read_text(encoding="utf-8") == metrics.markdown(), "run: python -m flowgrpo.metrics > docs/metrics.md"


def test_resuming_drops_later_lines_and_a_line_cut_off_by_a_kill(tmp_path):
    path = tmp_path / "metrics.jsonl"
    truncate(path, 3)
    assert not path.exists()
    log = Metrics(path)
    for iteration in range(6):
        log.write(iteration, {"loss": iteration / 7})
    kept = path.read_text().splitlines(keepends=True)[:4]
    with path.open("a") as file:
        file.write('{"iteration": 6, "lo')
    assert [row["iteration"] for row in read(path)] == list(range(6))
    truncate(path, 3)
    assert path.read_text() == "".join(kept)
    log.write(4, {"loss": 0.5})
    assert [row["iteration"] for row in read(path)] == list(range(5))


def test_a_failing_tracker_warns_once_and_the_others_go_on(tmp_path):
    class Broken:
        def log(self, values, iteration):
            raise ConnectionError("no route")

    class Recorder:
        def __init__(self):
            self.seen = []

        def log(self, values, iteration):
            self.seen.append((iteration, dict(values)))

    recorder = Recorder()
    log = Metrics(tmp_path / "metrics.jsonl", trackers=[Broken(), recorder])
    with pytest.warns(UserWarning, match="tracker Broken failed .*no route"):
        log.write(0, {"loss": 1.0})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        log.write(1, {"loss": 2.0})
    assert recorder.seen == [(0, {"loss": 1.0}), (1, {"loss": 2.0})]
    assert len(read(tmp_path / "metrics.jsonl")) == 2


def test_tensorboard_gets_every_number(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = Metrics(tmp_path / "metrics.jsonl", trackers=[TRACKERS["tensorboard"](tmp_path / "events")])
    for iteration in range(3):
        log.write(iteration, {"loss": 0.5 * iteration})
    events = EventAccumulator(str(tmp_path / "events")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("loss")] == [(0, 0.0), (1, 0.5), (2, 1.0)]
    assert [row["loss"] for row in map(json.loads, (tmp_path / "metrics.jsonl").open())] == [0.0, 0.5, 1.0]


def test_weights_and_biases_is_told_the_run_or_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match=r"pip install 'flowgrpo\[wandb\]'"):
        TRACKERS["wandb"](tmp_path / "my_run" / "wandb")
    calls = []
    run = types.SimpleNamespace(log=lambda values, step: calls.append((values, step)))
    fake = types.SimpleNamespace(init=lambda **arguments: calls.append(arguments) or run)
    monkeypatch.setitem(sys.modules, "wandb", fake)
    TRACKERS["wandb"](tmp_path / "my_run" / "wandb").log({"loss": 1.0}, 3)
    assert calls[0]["name"] == "my_run"
    assert calls[1] == ({"loss": 1.0}, 3)
