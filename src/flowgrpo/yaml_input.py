"""A config's text: strict YAML, paths beside the file, ``key=value`` overrides."""

import re
from pathlib import Path
from typing import Any

import yaml


class _StrictLoader(yaml.SafeLoader):
    """Safe YAML in which a key may not come twice and 1e-4 is a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=deep) for key, _ in node.value]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"line {node.start_mark.line + 1}: key {key!r} comes twice; keep one")
        return super().construct_mapping(node, deep=deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+0123456789.")
)


def read_mapping(path: Path) -> dict[str, Any]:
    """The settings in a YAML file, its paths resolved. Raises ValueError for what is not a mapping in strict YAML."""
    if not path.is_file():
        raise ValueError(f"config file {str(path)!r} does not exist; give the path of a YAML file")
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _StrictLoader)
    except (yaml.YAMLError, UnicodeDecodeError, ValueError) as error:
        raise ValueError(f"{path}: not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path}: must be a mapping of settings, got {type(raw).__name__}")
    return _resolve_paths(raw, path.resolve().parent)


def _resolve_paths(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {k: _resolve_paths(v, folder) for k, v in value.items()}
    if isinstance(value, list):
        return [_resolve_paths(v, folder) for v in value]
    if isinstance(value, str) and value.startswith(("./", "../")):
        return str((folder / value).resolve())
    return value


def apply_override(raw: dict[str, Any], override: str) -> None:
    """Put an ``a.b=value`` into a raw config. Raises ValueError for what is none."""
    name, separator, text = override.partition("=")
    if not separator or not name:
        raise ValueError(f"an override must look like key=value (sampler.num_steps=10), got {override!r}")
    try:
        value = _resolve_paths(yaml.load(text, _StrictLoader), Path.cwd())
    except (yaml.YAMLError, TypeError, ValueError) as error:
        raise ValueError(f"override {name}: {text!r} is not valid YAML: {' '.join(str(error).split())}") from error
    *parents, last = name.split(".")
    here: Any = raw
    for part in parents:
        here = _child(here, part, name)
        if isinstance(here, str):
            raise ValueError(f"override {name}: {part!r} is {here!r}; give it as a mapping, {part}={{use: {here}, ...}}")
        if not isinstance(here, dict | list):
            raise ValueError(f"override {name}: {part!r} is {here!r} and has no parts; give it as a mapping, {part}={{...}}")
    if isinstance(here, list):
        _child(here, last, name)
        here[int(last)] = value
    else:
        here[last] = value


def _child(here: Any, part: str, name: str) -> Any:
    if isinstance(here, list):
        if not part.isdigit() or int(part) >= len(here):
            raise ValueError(f"override {name}: {part!r} must be a position below {len(here)}")
        return here[int(part)]
    if isinstance(here, dict):
        here[part] = {} if here.get(part) is None else here[part]
        return here[part]
    return here
