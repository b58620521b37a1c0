"""The base of every configuration: typed, frozen, strict, and open to classes from outside.

Nothing here, and no `config.py` anywhere in the package, imports torch: a misspelt key is answered
before a second has passed, long before the first tensor. That is why a config stands *beside* the
module it builds (`ffn/config.py` beside `ffn/dense.py`) and imports it only inside `build`.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, get_args, get_origin

from pydantic import (
    BaseModel,
    ConfigDict,
    GetJsonSchemaHandler,
    ModelWrapValidatorHandler,
    ValidationError,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError


class ConfigError(ValueError):
    """Input a person can mend. `str(error)` is one line per mistake, each naming the key or file."""


class Config(BaseModel, frozen=True):
    """A frozen set of typed options; the docstring under each field is its help text."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,  # `true` is not 1 and "16" is not 16
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        validate_default=True,
    )

    @model_validator(mode="wrap")
    @classmethod
    def _choose_class_and_refuse_unknown_keys(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Any:
        if isinstance(data, BaseModel):
            return handler(data)
        data = cls._as_mapping(data)
        chosen = cls._class_for(data)
        if chosen is not cls:
            return chosen.model_validate(data)
        known = set(cls.known_keys())
        unknown = [key for key in data if key not in known]
        if unknown:
            raise _errors_at(cls, {str(key): _unknown_key(cls, key) for key in unknown}, data)
        return handler(data)

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        if not isinstance(data, Mapping):
            raise PydanticCustomError(
                "not_a_mapping", "must be a mapping of options, got {got}", {"got": repr(data)}
            )
        return data

    @classmethod
    def _class_for(cls, data: Mapping[Any, Any]) -> type[Config]:
        """The class that validates `data`: this one, except at the root of a family."""
        return cls

    @classmethod
    def known_keys(cls) -> Iterable[str]:
        """The keys this config takes."""
        return cls.model_fields

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists, strings and numbers: what YAML files and checkpoints hold."""
        return self.model_dump(mode="json", serialize_as_any=True)


class TaggedConfig(Config, frozen=True):
    """Base of the families whose member is picked by a `type:` tag.

    A direct subclass is the root of a family (`FFNConfig`, `RouterConfig`, ...). A class below a root
    joins it under every value of its own `type: Literal[...]`. A class outside the package needs no
    registration and no `type` field: it is named by its import path, `my_module:MyConfig` or
    `path/to/file.py:MyConfig`. Reading such a tag imports that module, which runs its code.

    Wherever a family is expected, `swiglu` is short for `{type: swiglu}`.
    """

    type: str
    """Which member of the family: a known name, or `module:ClassName` for a class of your own."""

    members: ClassVar[dict[str, type[TaggedConfig]]]
    """The named classes of this family, by tag."""

    @classmethod
    def __pydantic_init_subclass__(cls, **kwargs: Any) -> None:
        super().__pydantic_init_subclass__(**kwargs)
        if cls.is_family_root():
            cls.members = {}
            return
        annotation = cls.model_fields["type"].annotation
        if get_origin(annotation) is Literal:
            cls._join_family(get_args(annotation))

    @classmethod
    def _join_family(cls, tags: Iterable[str]) -> None:
        for tag in tags:
            owner = cls.members.get(tag, cls)
            if (owner.__module__, owner.__qualname__) != (cls.__module__, cls.__qualname__):
                raise TypeError(
                    f"{cls.__name__} would take the type '{tag}' from {owner.__name__}; give it a "
                    "Literal of its own, or `type: str` to name it by its import path"
                )
            cls.members[tag] = cls

    @classmethod
    def is_family_root(cls) -> bool:
        return TaggedConfig in cls.__bases__

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        if isinstance(data, str):
            return {"type": data}
        data = super()._as_mapping(data)
        if (
            "type" not in data
            and cls.model_fields["type"].is_required()
            and not cls.is_family_root()
        ):
            return {"type": f"{cls.__module__}:{cls.__qualname__}", **data}
        return data

    @classmethod
    def _class_for(cls, data: Mapping[Any, Any]) -> type[Config]:
        if not cls.is_family_root():
            return cls
        tag = data.get("type")
        if isinstance(tag, str) and tag in cls.members:
            return cls.members[tag]
        known = ", ".join(cls.members)
        if tag is None:
            raise _errors_at(cls, {"type": f"missing; one of: {known}, or module:ClassName"}, data)
        if isinstance(tag, str) and ":" in tag:
            try:
                return _import_class(tag, family=cls)
            except ConfigError as error:
                raise _errors_at(cls, {"type": str(error)}, data) from error
        hint = did_you_mean(str(tag), cls.members)
        raise _errors_at(cls, {"type": f"unknown '{tag}'{hint}; known: {known}"}, data)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # A family may hold itself (an MoE's shared expert is an FFN), which pydantic would expand
        # for ever; `json_schema` below puts each family in `$defs` once.
        return {_FAMILY: cls.__name__} if cls.is_family_root() else handler(core_schema)


_FAMILY = "x-family"


def json_schema(root: type[Config]) -> dict[str, Any]:
    """The JSON schema of `root`, every family in it as an `anyOf` over its named members."""
    families = {family.__name__: family for family in TaggedConfig.__subclasses__()}
    definitions: dict[str, Any] = {}

    def define(cls: type[Config]) -> dict[str, Any]:
        schema = cls.model_json_schema()
        for name, definition in schema.pop("$defs", {}).items():
            definitions.setdefault(name, resolve(definition))
        return resolve(schema)

    def resolve(node: Any) -> Any:
        if isinstance(node, list):
            return [resolve(item) for item in node]
        if not isinstance(node, dict):
            return node
        if _FAMILY not in node:
            return {key: resolve(value) for key, value in node.items()}
        name = node[_FAMILY]
        if name not in definitions:
            definitions[name] = {}  # claims the name before members that refer back to it
            family = families[name]
            named = [define(member) for member in dict.fromkeys(family.members.values())]
            own = {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"type": "string", "pattern": ":"}},
            }
            definitions[name] = {"anyOf": [*named, {"enum": list(family.members)}, own]}
        rest = {key: resolve(value) for key, value in node.items() if key != _FAMILY}
        return {"$ref": f"#/$defs/{name}", **rest}

    return {**define(root), "$defs": definitions}


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'num_experts'?"` for a near miss, otherwise the empty string."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def explain(error: ValidationError) -> list[str]:
    """One sentence per mistake, `model.ffn.num_experts: must be at least 1, got 0`."""
    lines: list[str] = []
    for item in error.errors(include_url=False):
        path = ".".join(str(part) for part in item["loc"])
        rule = _RULES.get(item["type"], item["msg"])
        message = rule.format(**item.get("ctx", {})) if rule is not item["msg"] else rule
        if rule is not item["msg"] and item["type"] != "missing":
            message += f", got {_shorten(repr(item['input']))}"
        message = message.removeprefix("Value error, ")
        lines.append(f"{path}: {message}" if path else message)
    return lines


_RULES = {
    "missing": "missing; this option has no default",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text (in YAML, put quotes around it)",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
    "tuple_type": "must be a list",
    "dict_type": "must be a mapping",
    "finite_number": "must be a finite number",
    "literal_error": "must be one of {expected}",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "too_short": "must have at least {min_length} entries",
    "string_too_short": "must not be empty",
}


def _shorten(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


def _unknown_key(cls: type[Config], key: object) -> str:
    known = list(cls.known_keys())
    return "unknown" + (did_you_mean(str(key), known) or f"; known: {', '.join(known)}")


def _errors_at(cls: type[Config], messages: Mapping[str, str], data: Any) -> ValidationError:
    details = [
        InitErrorDetails(
            type=PydanticCustomError("config", "{message}", {"message": message}),
            loc=(key,),
            input=data,
        )
        for key, message in messages.items()
    ]
    return ValidationError.from_exception_data(cls.__name__, details)


def _import_class(tag: str, family: type[TaggedConfig]) -> type[TaggedConfig]:
    """The class that `module:ClassName` or `path/to/file.py:ClassName` names."""
    where, _, name = tag.rpartition(":")
    module = _import_file(Path(where)) if where.endswith(".py") else _import_module(where)
    found = getattr(module, name, None)
    if found is None:
        raise ConfigError(f"'{where}' has no '{name}'{did_you_mean(name, vars(module))}")
    if not (isinstance(found, type) and issubclass(found, family)):
        raise ConfigError(f"'{tag}' must be a subclass of {family.__name__}, got {found!r}")
    if inspect.isabstract(found):
        missing = ", ".join(sorted(found.__abstractmethods__))
        raise ConfigError(f"'{tag}' must define {missing}")
    return found


def _import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may fail in any way; the key is what helps them
        raise ConfigError(f"importing '{name}' failed: {type(error).__name__}: {error}") from error


def _import_file(path: Path) -> Any:
    module_name = f"moe_ffn_user_{path.stem}_{abs(hash(path.resolve()))}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"'{path}' is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # as above
        del sys.modules[module_name]
        raise ConfigError(f"importing '{path}' failed: {type(error).__name__}: {error}") from error
    return module
