"""Configs: what is read, what is refused, and how the refusal helps."""

from pathlib import Path

import pytest
import yaml

from flowgrpo.build import build
from flowgrpo.choices import choose
from flowgrpo.config import RunConfig, Section, dump_config, load_config, parse_config
from flowgrpo.slots import construct, import_object, nearest
from flowgrpo.window import WINDOWS, Progressive
from tests.toys import config, raw_config

ROOT = Path(__file__).parent.parent
CONFIGS = sorted((ROOT / "configs").rglob("*.yaml"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(raw_config(tmp_path)), encoding="utf-8")
    return path


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.stem)
def test_every_recipe_is_read_and_its_slots_are_filled(path):
    settings = load_config(path)
    choose(settings)
    assert path.read_text().startswith("# ")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("learning_rat=1e-4", r"learning_rat: unknown setting.*here it is called 'optimizer.lr'"),
        ("sampler.num-steps=10", r"sampler.num-steps: unknown setting in section 'sampler' \(did you mean 'num_steps'\?\)"),
        ("lr=1e-4", r"lr: unknown setting.*it belongs to 'optimizer.lr'"),
        ("num_generations=8", r"here it is called 'group_size'"),
        ("group_size=4.5", r"group_size: .*integer.*got 4.5"),
        ("group_size=four", r"group_size: .*integer.*got 'four'"),
        ("rewards.0.wieght=1", r"rewards.0.wieght: unknown setting.*'weight'"),
        ("rewards.7.weight=1", r"override rewards.7.weight: '7' must be a position below 2"),
        ("sampler.window={use: random", "override sampler.window: .* is not valid YAML"),
        ("sampler.num_steps.x=3", "'num_steps' is .* and has no parts"),
        ("sampler.window='[0,7]'", r"sampler.window.use: unknown name '\[0,7\]'.*all, .*frozen, .*progressive, random"),
        ("sampler.window=[0,7]", r"sampler.window"),
        ("sampler.window.sise=3", r"sampler.window.sise: unknown setting \(did you mean 'size'\?\)"),
        ("sampler.window.size=9", r"window.size=9 does not fit.*sampler.num_steps=4"),
        ("sampler.window.interval=3", r"sampler.window.interval: unknown setting"),  # the random window has none
        ("sampler.transition={use: cps, noise_level: 2}", r"sampler.transition: .*noise_level must be in \[0, 1\]"),
        ("sampler.transition={use: flow_sde, noise_level: 0}", r"noise_level must be above 0 to train"),
        ("sampler.guidance_scale=0", r"sampler.guidance_scale: .*greater than or equal to 1"),
        ("evaluation.gold=pink", r"evaluation.gold='pink' must be the name of a reward, one of \['red', 'bright'\]"),
        ("rewards.0.weight=0", r"at least one must have a weight above 0"),
        ("rewards.1.name=red", r"names must differ"),
        ("objective.clip_range=0", r"objective: objective.clip_range must be between 0 and 1"),
        ("sampler.schedule={use: explicit, levels: [1, 0.5, 0]}", r"levels has 3 levels.*needs 5"),
        ("nonsense", r"an override must look like key=value"),
        ("name=a/b", r"name: .*pattern"),
        ("name=..", r"name: .*pattern"),
    ],
)
def test_a_wrong_setting_is_refused_with_its_path_and_the_remedy(file, override, message):
    def read():
        settings = load_config(file, [override])
        return choose(settings).schedule.sigmas(settings.sampler.num_steps)

    with pytest.raises(ValueError, match=message):
        read()


def test_overrides_are_typed_like_yaml(file):
    settings = load_config(file, ["optimizer.lr=1e-4", "sampler.window.size=1", "model.call={max_sequence_length: 5}"])
    assert settings.optimizer.lr == 1e-4
    assert choose(settings).window.size == 1
    assert settings.model.call == {"max_sequence_length": 5}


def test_paths_are_resolved_against_the_config_file_and_overrides_against_the_present_folder(file, monkeypatch, tmp_path):
    raw = yaml.safe_load(file.read_text())
    raw["prompts"]["train"] = "./prompts.txt"
    file.write_text(yaml.safe_dump(raw))
    monkeypatch.chdir("/")
    assert load_config(file).prompts.train == str(tmp_path / "prompts.txt")
    assert load_config(file, ["prompts.train=./x.txt"]).prompts.train == "/x.txt"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nname: b\n", "comes twice"),
        ("- a\n- b\n", "must be a mapping"),
        ("a: [1\n", "not valid YAML"),
        ("", "must be a mapping"),
    ],
)
def test_files_that_are_no_config_are_refused_in_one_line(tmp_path, text, message):
    path = tmp_path / "x.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=message) as caught:
        load_config(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named():
    with pytest.raises(ValueError, match=r"'nowhere.yaml' does not exist"):
        load_config("nowhere.yaml")


def test_a_written_config_reads_back_equal(file, tmp_path):
    settings = load_config(file)
    again = tmp_path / "again.yaml"
    again.write_text(dump_config(settings))
    assert load_config(again) == settings


def sections(model=RunConfig):
    found = {model}
    for field in model.model_fields.values():
        for annotation in (field.annotation, *getattr(field.annotation, "__args__", ())):
            if isinstance(annotation, type) and issubclass(annotation, Section):
                found |= sections(annotation)
    return found


def test_every_setting_is_read_by_some_code():
    code = "\n".join(path.read_text() for path in (ROOT / "src").rglob("*.py"))
    names = {f"{section.__name__}.{name}": name for section in sections() for name in section.model_fields}
    assert not [full for full, name in names.items() if f".{name}" not in code and f'"{name}"' not in code]


def test_slots_take_an_import_path_by_the_same_rule_as_a_name():
    from flowgrpo.slots import Slot

    by_name = construct(Slot.model_validate({"use": "progressive", "size": 2}), WINDOWS, "w")
    by_path = construct(Slot.model_validate({"use": "flowgrpo.window:Progressive", "size": 2}), WINDOWS, "w")
    assert by_name == by_path == Progressive(size=2)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("flowgrpo.windo:All", "cannot import module"),
        ("flowgrpo.window:Al", "did you mean 'All'"),
        ("x", "package.module:Name"),
    ],
)
def test_import_paths_that_lead_nowhere_say_which_half_is_wrong(path, message):
    with pytest.raises(ValueError, match=message):
        import_object(path, "sampler.window")


def test_far_words_get_the_whole_list():
    assert nearest("zzz", ["a", "b"]) == "; known here: a, b"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"group_size": 1}, r"group_size=1 must be at least 2"),
        ({"optimizer__updates_per_iteration": 3}, r"must split into.*set updates_per_iteration to 2 or 4"),
        ({"prompts_per_iteration": 5}, r"between 1 and the number of prompts \(4\)"),
        ({"sampler__height": 18}, r"sampler.height=18 must be a multiple of 4.*nearest: 16 or 20"),
        ({"sampler__num_frames": 5}, r"sampler.num_frames cannot take effect"),
        ({"model__call": {"max_sequence_lenth": 8}}, r"model.call.max_sequence_lenth: must be a further argument"),
        ({"model__call": {"num_inference_steps": 8}}, r"model.call.num_inference_steps: must be a further argument"),
        ({"model__lora": {"targets": ["to_x"]}}, r"model.lora.targets: no layer"),
        ({"rewards": [{"name": "r", "use": "redness"}]}, r"rewards.r.use: must be an import path"),
        ({"rewards": [{"name": "r", "use": "tests.toys:rednes"}]}, r"did you mean 'redness'"),
        ({"rewards": [{"name": "r", "use": "tests.toys:redness", "args": {"a": 1}}]}, r"takes no arguments"),
    ],
)
def test_what_does_not_fit_the_model_or_the_machine_is_refused_before_sampling(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        build(config(tmp_path, **changes))


def test_a_missing_model_folder_an_empty_prompt_file_and_prompts_of_their_own_size_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"the folder /nowhere/at/all does not exist"):
        build(config(tmp_path, model__pipeline="/nowhere/at/all"))
    with pytest.raises(ValueError, match=r"no model_index.json"):
        build(config(tmp_path, model__pipeline=str(tmp_path)))
    empty, sized = tmp_path / "empty.txt", tmp_path / "sized.jsonl"
    empty.write_text("\n \n")
    with pytest.raises(ValueError, match=r"empty.txt: a prompt file needs at least one prompt"):
        build(config(tmp_path, prompts__train=str(empty)))
    sized.write_text('{"prompt": "a"}\n{"prompt": "b", "height": 32}\n')
    with pytest.raises(ValueError, match=r"sized.jsonl: prompt 1 asks for a size of its own"):
        build(config(tmp_path, prompts__train=str(sized)))


def test_lora_settings_beside_full_training_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"model.lora has no effect with model.train: full"):
        choose(config(tmp_path, model__train="full"))


def test_a_config_never_changes(tmp_path):
    settings = parse_config(raw_config(tmp_path))
    with pytest.raises(ValueError, match="frozen"):
        settings.seed = 3
