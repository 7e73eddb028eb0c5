"""What a section of a recipe is, and how one is made of a policy of the library."""

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

from shardwright.extras import from_extra
from shardwright.options import words_of

with from_extra("train"):
    from pydantic import BaseModel, ConfigDict, Field, create_model, field_validator


class Section(BaseModel):
    """Base of all sections: frozen, no unknown keys, no silent conversion (``"50"`` is not a number), and no
    number that overflows where it is used."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _is_a_whole_number_of_toml(cls, value: object) -> object:
        if type(value) is int and value >= 2**63:
            raise ValueError("expected less than 2 ** 63")
        return value


Seconds = Annotated[float, Field(le=1e9)]
"""Of a wait: timers of the system and of Python overflow beyond some 292 years."""


class PolicySection(Section):
    """A section with the fields of a policy. TOML has no null: where the policy takes None it has 0, or
    "auto" in place of a bool."""

    made_of: ClassVar[Any]

    def policy(self) -> Any:
        """The policy itself."""
        values = ((field, getattr(self, field.name)) for field in dataclasses.fields(self.made_of))
        given = {field.name: None if _stands_for_none(field, v) else v for field, v in values}
        return self.made_of(**given)


def _stands_for_none(field: Any, value: object) -> bool:
    return field.default is None and (value == "auto" or (value == 0 and value is not False))


def keys_of(policy: Any, **kinds: Any) -> Any:
    """The base of a section: a key for each field of ``policy``, with its name, type, limits and default, and
    with the first sentence that the docstring has of it, and what it says of None. kinds: types of keys that
    TOML writes in another way."""
    said, keys = words_of(policy), dict[str, Any]()
    for field in dataclasses.fields(policy):
        kind, default, limits = _in_toml(field)
        first, *more = said.get(field.name, "").split(". ")
        about = ". ".join([first, *(each for each in more if each.startswith("None:"))])
        for word, in_toml in {"None:": f"{default or 0}:", "True": "true", "False": "false"}.items():
            about = about.replace(word, in_toml)
        key = Field(default=default, description=about, **limits)
        keys[field.name] = (kinds.get(field.name, kind), key)
    made: Any = create_model(f"{policy.__name__}Section", __base__=PolicySection, **keys)
    made.made_of = policy
    return made


def _in_toml(field: Any) -> tuple[Any, Any, Mapping[str, Any]]:
    """Type, default and limits."""
    kind: Any = field.type
    default, limits, is_choice = field.default, field.metadata, issubclass(get_origin(kind) or kind, StrEnum)
    if default is dataclasses.MISSING:  # of what may depend on the environment it is the first value
        default = next(iter(kind)) if is_choice else field.default_factory()
    if NoneType in get_args(kind):
        kind = get_args(kind)[0]
        default, limits = ("auto", {}) if kind is bool else (kind(0), {"ge": 0})
        kind = bool | Literal["auto"] if kind is bool else kind
    elif is_choice:
        kind, default = Literal[*map(str, kind)], str(default)
    return Seconds if kind is float and field.name.endswith("_s") else kind, default, limits
