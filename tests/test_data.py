"""Prompt files, the order of prompts, and how samples are shared out."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flowgrpo.data import GroupSampler, check_geometry, load_prompts, rank_slice


def _write(path, content):
    path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8"))
    return path


@pytest.mark.parametrize("mark", [b"", b"\xef\xbb\xbf"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
def test_a_text_file_gives_one_prompt_a_line_whatever_its_mark_and_newlines(tmp_path, mark, newline):
    texts = ["a red cube", "ein größerer Würfel 🟥", "../../x", "مرحبا", "a\u200bb", "x" * 5000, "a\u2028b", " spaced "]
    lines = [texts[0].encode(), b"", b" \t ", "\u200b".encode(), *(t.encode() for t in texts[1:])]
    loaded = load_prompts(_write(tmp_path / "p.txt", mark + newline.join(lines) + newline))
    assert [p.text for p in loaded] == texts
    assert [p.id for p in loaded] == list(range(len(texts)))
    assert loaded.dropped == 3
    assert loaded[1].text == texts[1]
    assert len(loaded) == len(texts)


def test_a_jsonl_row_gives_the_prompt_its_sizes_and_all_else_as_meta(tmp_path):
    row = {"prompt": "a", "negative_prompt": "b", "height": 32, "width": 48, "num_frames": 5, "tag": "x", "n": [1]}
    prompt = load_prompts(_write(tmp_path / "p.jsonl", json.dumps(row) + "\n"))[0]
    assert (prompt.text, prompt.negative, prompt.height, prompt.width, prompt.num_frames) == ("a", "b", 32, 48, 5)
    assert prompt.meta == {"tag": "x", "n": [1]}
    assert hash(prompt) == hash(prompt)


def test_equal_texts_stay_two_prompts(tmp_path):
    path = _write(tmp_path / "p.jsonl", '{"prompt": "a", "n": 1}\n{"prompt": "a", "n": 2}\n{"prompt": " "}\n')
    loaded = load_prompts(path)
    assert [(p.id, p.text, p.meta["n"]) for p in loaded] == [(0, "a", 1), (1, "a", 2)]
    assert loaded.dropped == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.txt", b"", "at least one prompt, found 0 lines"),
        ("p.txt", b"\n  \r\n", "at least one prompt, found 2 lines, all blank"),
        ("p.txt", b"good\ncaf\xe9 noir\n", "line 2: prompts must be UTF-8, got byte 0xe9 at column 4"),
        ("p.txt", "a cube".encode("utf-16"), "line 1: prompts must be UTF-8"),
        ("p.txt", "a cube".encode("utf-16-le"), "line 1: a prompt must not hold NUL"),
        ("p.txt", b"good\n\0\n", "line 2: a prompt must not hold NUL"),
        ("p.jsonl", b'{"prompt": "a\\u0000b"}', "line 1: a prompt must not hold NUL"),
        ("p.jsonl", b'{"prompt": "\\ud800"}', "half of a surrogate pair"),
        ("p.jsonl", b'\n{"text": "a"}', r"line 2: a row needs .prompt., got only \['text'\]"),
        ("p.jsonl", b'{"prompt": "a"}\n{"prompt": ', "line 2: every line must be one JSON object"),
        ("p.jsonl", b'["a"]', "one JSON object, got a list"),
        ("p.jsonl", b'{"prompt": 3}', '"prompt" must be text, got 3'),
        ("p.jsonl", b'{"prompt": "a", "negative_prompt": 3}', '"negative_prompt" must be text'),
        ("p.jsonl", b'{"prompt": "a", "height": "32"}', '"height" must be a whole number above 0'),
        ("p.jsonl", b'{"prompt": "a", "width": 0}', '"width" must be a whole number'),
        ("p.jsonl", b'{"prompt": "a", "num_frames": true}', '"num_frames" must be a whole number'),
        ("p.docx", b"a", "ends in .txt or .jsonl, got '.docx'"),
    ],
)
def test_a_faulty_prompt_file_is_refused_by_name_and_line(tmp_path, name, content, message):
    path = _write(tmp_path / name, content)
    with pytest.raises(ValueError, match=message) as error:
        load_prompts(path)
    assert str(path) in str(error.value)


def test_a_missing_prompt_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"none\.txt: a prompt file must exist, found nothing"):
        load_prompts(tmp_path / "none.txt")
    (tmp_path / "folder.txt").mkdir()
    with pytest.raises(ValueError, match="found a folder"):
        load_prompts(tmp_path / "folder.txt")


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_iterations_use_different_prompts_and_epochs_use_each_prompt_once(data):
    available = data.draw(st.integers(1, 17))
    wanted = data.draw(st.integers(1, available))
    sampler = GroupSampler(available, wanted, seed=data.draw(st.integers(0, 3)))
    stream = []
    for iteration in range(3 * available):
        ids = sampler.at(iteration)
        assert len(set(ids)) == len(ids) == wanted
        stream += ids
    for start in range(0, len(stream) - available + 1, available):
        assert sorted(stream[start : start + available]) == list(range(available))


def test_an_iteration_depends_on_seed_and_number_alone():
    forwards = [GroupSampler(11, 4, seed=5).at(k) for k in range(30)]
    backwards = [GroupSampler(11, 4, seed=5).at(k) for k in reversed(range(30))][::-1]
    assert forwards == backwards
    assert len(set(forwards)) == 30
    assert forwards != [GroupSampler(11, 4, seed=6).at(k) for k in range(30)]


def test_more_prompts_an_iteration_than_there_are_is_refused():
    with pytest.raises(ValueError, match=r"prompts_per_iteration=5 must be between 1 and the number of prompts \(4\)"):
        GroupSampler(4, 5, seed=0)


@pytest.mark.parametrize(
    ("prompts", "group", "processes", "updates"), [(2, 12, 8, 1), (3, 4, 3, 2), (1, 8, 1, 4), (2, 6, 2, 3)]
)
def test_slices_and_updates_share_every_sample_out_once(prompts, group, processes, updates):
    geometry = check_geometry(prompts, group, processes, updates)
    slices = [rank_slice(geometry.samples, rank, processes) for rank in range(processes)]
    assert [row for part in slices for row in part] == list(range(prompts * group))
    assert all(len(part) == geometry.samples_per_process == geometry.samples_per_update * updates for part in slices)


@given(st.integers(1, 9), st.integers(2, 9), st.integers(1, 9), st.integers(1, 9))
def test_an_impossible_geometry_names_the_nearest_settings_that_work(prompts, group, processes, updates):
    def works(p, u):
        return p * group % (processes * u) == 0

    try:
        check_geometry(prompts, group, processes, updates)
        assert works(prompts, updates)
    except ValueError as error:
        _, text = str(error).rsplit("set prompts_per_iteration to ", 1)
        prompt_text, _, update_text = text.partition(" or set updates_per_iteration to ")
        named = [int(word) for word in prompt_text.split(" or ")]
        nearest = [p for p in range(prompts, 0, -1) if works(p, updates)][:1]
        nearest += [next(p for p in range(prompts, 1000) if works(p, updates))]
        assert named == nearest
        for word in filter(None, update_text.split(" or ")):
            assert works(prompts, int(word))


@pytest.mark.parametrize("size", [1, 0, -3])
def test_a_group_of_one_is_refused_with_the_reason(size):
    with pytest.raises(ValueError, match=f"group_size={size} must be at least 2: an advantage compares"):
        check_geometry(4, size)


def test_counts_below_one_and_unequal_slices_are_refused():
    with pytest.raises(ValueError, match="updates_per_iteration=0 must be at least 1"):
        check_geometry(4, 4, 1, 0)
    with pytest.raises(ValueError, match="10 samples cannot be shared equally by 4 processes"):
        rank_slice(10, 0, 4)
    with pytest.raises(ValueError, match="rank 4"):
        rank_slice(8, 4, 4)
