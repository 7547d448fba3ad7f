"""`flowgrpo score`: what is found, what comes of it, and a call that is cut off."""

import json
import math

import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from flowgrpo import cli
from flowgrpo.component import Component
from flowgrpo.data import load_prompts
from flowgrpo.media import save_image, save_video
from flowgrpo.score import find_items, read_rewards, score_items, write_table
from flowgrpo.scoring import Scorer
from tests.toys import brightness, redness

COLOURS = [(i / 20, 0.5, 1 - i / 20) for i in range(20)]


def picture(colour, height=8, width=8):
    return torch.tensor(colour).view(3, 1, 1).expand(3, height, width)


@pytest.fixture
def folder(tmp_path):
    """Twenty pictures of two sizes in a folder without a manifest, half of them with a text beside."""
    made = tmp_path / "pictures"
    (made / "deep").mkdir(parents=True)
    for i, colour in enumerate(COLOURS):
        path = made / ("deep" if i >= 10 else ".") / f"{i:03d}.png"
        save_image(picture(colour, 8, 8 + 8 * (i % 2)), path)
        if i % 2:
            path.with_suffix(".txt").write_text(f"colour {i}\n")
    return made


def scorer(*models):
    return Scorer([Component(model.__name__, model, 0.0, identity=model.__name__) for model in models or (redness, brightness)])


def test_a_folder_is_searched_and_texts_beside_are_prompts(folder):
    items = find_items([folder])
    assert [item.name for item in items] == [f"{i:03d}.png" for i in range(10)] + [f"deep/{i:03d}.png" for i in range(10, 20)]
    assert [item.prompt.text for item in items][:4] == ["", "colour 1", "", "colour 3"]
    assert [item.prompt.id for item in items] == list(range(20))


def test_a_score_is_the_models_whatever_the_batch_and_sizes(folder, tmp_path):
    items = find_items([folder])
    for batch_size in (1, 7, 64):
        scores = torch.tensor(score_items(scorer(), items, tmp_path / f"{batch_size}.jsonl", batch_size=batch_size))
        assert torch.allclose(scores[:, 0], torch.tensor(COLOURS)[:, 0], atol=0.51 / 255)
        assert torch.allclose(scores[:, 1], torch.full((20,), 0.5), atol=0.51 / 255)


def test_tables_name_files_beside_them_and_carry_what_they_say(folder, tmp_path):
    rows = [{"file": f"{i:03d}.png", "prompt": f"p{i}", "prompt_id": i, "sample": 0, "fps": 16} for i in (3, 1)]
    rows.append({"file": None, "prompt": "failed", "prompt_id": 2, "sample": 0})
    (folder / "manifest.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert [item.name for item in find_items([folder])] == ["003.png", "001.png"]
    items = find_items([folder / "manifest.jsonl"])
    assert items[0].facts == {"prompt_id": 3, "sample": 0}
    write_table(folder / "table.parquet", items, ["red"], [[0.5], [math.nan]])
    again = find_items([folder / "table.parquet"])
    assert [(item.path, item.prompt.text, item.facts) for item in again] == [(i.path, i.prompt.text, i.facts) for i in items]
    assert pq.read_table(folder / "table.parquet").to_pydict()["red"] == [0.5, None]
    with pytest.raises(ValueError, match="a reward must not be named like the column 'file'"):
        write_table(tmp_path / "x.parquet", items, ["file"], [[0.5], [0.5]])


def test_a_prompt_file_gives_what_the_manifest_does_not_say(folder, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "p0", "kind": "a"}\n{"prompt": "p1", "kind": "b"}\n')
    row = {"file": "001.png", "prompt": "p1", "prompt_id": 1, "sample": 0}
    (folder / "manifest.jsonl").write_text(json.dumps(row))
    (item,) = find_items([folder], load_prompts(prompts))
    assert (item.prompt.text, item.prompt.meta) == ("p1", {"kind": "b"})
    (folder / "manifest.jsonl").write_text(json.dumps({**row, "prompt": "another"}))
    with pytest.raises(ValueError, match=r"its prompt 1 is 'another', in .*prompts.jsonl it is 'p1'"):
        find_items([folder], load_prompts(prompts))
    (folder / "manifest.jsonl").write_text(json.dumps({**row, "prompt_id": 9}))
    with pytest.raises(ValueError, match="it is None"):
        find_items([folder], load_prompts(prompts))


def test_films_are_scored_as_films_and_a_broken_file_has_no_score(tmp_path):
    clip = torch.stack([picture((0.25, 0.0, 0.0), 16, 16), picture((0.75, 0.0, 0.0), 16, 16)])
    save_video(clip, tmp_path / "a.gif", 8)
    (tmp_path / "b.png").write_bytes(b"no picture")
    save_image(picture((1.0, 0.0, 0.0)), tmp_path / "c.png")
    with pytest.warns(UserWarning, match=r"b.png cannot be read and has no scores: UnidentifiedImageError"):
        scores = score_items(scorer(redness), find_items([tmp_path]), tmp_path / "log.jsonl")
    assert scores[0][0] == pytest.approx(0.5, abs=0.01)
    assert math.isnan(scores[1][0])
    assert scores[2][0] == 1.0


def test_a_call_that_is_cut_off_goes_on_and_ends_with_the_same_file(folder, tmp_path):
    items, log, calls = find_items([folder]), tmp_path / "log.jsonl", []

    def counted(media, prompts):
        calls.append(len(prompts))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return redness(media, prompts)

    whole = score_items(scorer(redness), items, tmp_path / "whole.jsonl")
    write_table(tmp_path / "whole.parquet", items, ["redness"], whole)
    breaks = Scorer([Component("redness", counted, 0.0, identity="redness")])
    with pytest.raises(KeyboardInterrupt):
        score_items(breaks, items, log, batch_size=5)
    log.write_text(log.read_text() + "[9, [0.")
    heard = []
    again = score_items(breaks, items, log, batch_size=5, on_batch=heard.append)
    assert heard[0] == 5
    assert sum(calls) == 20 + 5  # the second batch was asked for twice
    write_table(tmp_path / "again.parquet", items, ["redness"], again)
    assert (tmp_path / "again.parquet").read_bytes() == (tmp_path / "whole.parquet").read_bytes()
    with pytest.raises(ValueError, match="holds scores of other files or rewards"):
        score_items(scorer(brightness), items, log)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nowhere", "there is no such file or folder"),
        ("empty", "there must be pictures or films.* found none in"),
        ("a.xyz", "must be a folder, a table"),
        ("b.jsonl", "every line must be one JSON object"),
        ("c.jsonl", "row 1: a row must name its file"),
    ],
)
def test_what_cannot_be_scored_is_one_line(tmp_path, path, message):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.xyz").write_text("")
    (tmp_path / "b.jsonl").write_text("{")
    (tmp_path / "c.jsonl").write_text('{"prompt": "p"}')
    with pytest.raises(ValueError, match=message):
        find_items([tmp_path / path])


def test_rewards_are_those_of_a_config_or_import_paths(tmp_path):
    (tmp_path / "r.yaml").write_text("name: x\nrewards:\n  - {name: red, use: 'tests.toys:redness'}\n")
    found = read_rewards([str(tmp_path / "r.yaml"), "tests.toys:brightness"])
    assert [(one.name, one.use) for one in found] == [("red", "tests.toys:redness"), ("brightness", "tests.toys:brightness")]
    (tmp_path / "r.yaml").write_text("name: x\n")
    with pytest.raises(ValueError, match="there must be a list of rewards in it, got NoneType"):
        read_rewards([str(tmp_path / "r.yaml")])
    (tmp_path / "r.yaml").write_text("rewards: [{use: 'tests.toys:redness'}]\n")
    with pytest.raises(ValueError, match="name"):
        read_rewards([str(tmp_path / "r.yaml")])


def test_the_command_writes_a_table_and_says_what_it_holds(folder, tmp_path):
    arguments = ["score", str(folder), "--rewards", "tests.toys:redness", "--output", str(tmp_path / "s.parquet")]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    table = pq.read_table(tmp_path / "s.parquet").to_pydict()
    assert table["file"][0] == "000.png"
    assert table["redness"][7] == pytest.approx(7 / 20, abs=0.51 / 255)
    assert not (tmp_path / "s.parquet.jsonl").exists()
    assert "redness" in result.output
    assert "20" in result.output
    again = CliRunner().invoke(cli.app, arguments)
    assert again.exit_code == 2
    assert "s.parquet exists; remove it" in again.output.replace("\n", " ")
