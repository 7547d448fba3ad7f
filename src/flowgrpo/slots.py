"""Slots: a choice in a config becomes an object, everywhere by the same rule.

A slot names an entry of its module's table (``cps``) or an import path (``package.module:Name``); the other keys are the
constructor's arguments. They are checked against its signature, so that no setting is silently ignored.
"""

import difflib
import importlib
import inspect
import typing
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, model_validator


class Slot(BaseModel):
    """``{use: name, **arguments}``, or just ``name``."""

    model_config = ConfigDict(extra="allow", frozen=True)
    use: str

    @model_validator(mode="before")
    @classmethod
    def _from_name(cls, value: Any) -> Any:
        return {"use": value} if isinstance(value, str) else value

    @property
    def args(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return dict(self.__pydantic_extra__ or {})


def nearest(word: str, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` for the likeliest known word, or the whole list when none is near."""
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f" (did you mean {close[0]!r}?)" if close else f"; known here: {', '.join(known)}"


def import_object(path: str, where: str) -> Any:
    """The object at ``package.module:Name``. Raises ValueError that says which half could not be found."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise ValueError(f"{where}: an import path must look like 'package.module:Name', got {path!r}")
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise ValueError(f"{where}: cannot import module {module_name!r} ({error}); install it or fix the path") from error
    if not hasattr(module, name):
        raise ValueError(f"{where}: module {module_name!r} has no {name!r}{nearest(name, vars(module))}")
    return getattr(module, name)


def construct(slot: Slot, table: Mapping[str, Callable[..., Any]], where: str) -> Any:
    """Build the object that a slot names.

    Raises ValueError, with the setting's path, for an unknown name or argument, a missing argument or a wrong type.
    """
    if ":" in slot.use:
        factory = import_object(slot.use, where)
    elif slot.use in table:
        factory = table[slot.use]
    else:
        raise ValueError(
            f"{where}.use: unknown name {slot.use!r}{nearest(slot.use, table)}, or give an import path 'package.module:Name'"
        )
    return call_checked(factory, slot.args, where)


def call_checked(factory: Callable[..., Any], args: Mapping[str, Any], where: str) -> Any:
    """Call `factory` with `args`, each checked against the signature's names and types."""
    parameters = inspect.signature(factory).parameters
    open_ended = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    for name in args:
        if name not in parameters and not open_ended:
            raise ValueError(f"{where}.{name}: unknown setting{nearest(name, parameters)}")
    for name, parameter in parameters.items():
        named = parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        if named and parameter.default is inspect.Parameter.empty and name not in args:
            raise ValueError(f"{where}.{name}: must be given, is missing")
    hints = typing.get_type_hints(getattr(factory, "__init__", factory) if inspect.isclass(factory) else factory)
    values = {name: _checked(value, hints.get(name, Any), f"{where}.{name}") for name, value in args.items()}
    try:
        return factory(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def _checked(value: Any, hint: Any, where: str) -> Any:
    try:
        return TypeAdapter(hint).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{where}: {error.errors()[0]['msg']}, got {value!r}") from error
