"""Base classes of all configs: typed, frozen, strict, and open to custom classes.

A config class is defined above the module that it builds. It computes the size and the cost of that module,
and says for which use cases the module is unsupported.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from itertools import pairwise
from textwrap import dedent
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

from moe_ffn.config.errors import (
    UNKNOWN_KEY,
    ConfigError,
    did_you_mean,
    explain,
    nearest_or_all,
    shorten,
    show,
)
from moe_ffn.config.import_path import FileTag, import_class, tag_of

MAX_COUNT = 10**9
"""Upper bound of every count and width; a larger number is surely a typo, and would overflow later."""

FAMILY_KEY = "x-family"
"""Key of a JSON schema that refers to a family by name; `json_schema` replaces it."""


class Config(BaseModel, frozen=True):
    """A frozen set of typed options; the docstring under each field is its help text."""

    model_config = ConfigDict(
        defer_build=True,  # a class that no config uses costs no time at import
        extra="forbid",
        strict=True,  # `true` is not 1 and "16" is not 16
        allow_inf_nan=False,
        validate_default=True,
    )

    rejected_options: ClassVar[frozenset[str]] = frozenset()
    """Inherited options that this class rejects; the help leaves them out."""

    wrong_value_hint: ClassVar[str] = ""
    """End of the message about a value that is not a mapping or names an unknown type: `; use ...`."""

    def __init__(self, /, **options: Any) -> None:
        try:
            super().__init__(**options)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error))) from error

    # Otherwise `model_validate` would call `__init__`.
    __init__.__pydantic_base_init__ = True  # pyright: ignore[reportFunctionMemberAccess]

    @model_validator(mode="wrap")
    @classmethod
    def _choose_class_and_reject_unknown_keys(
        cls, data: Any, handler: ModelWrapValidatorHandler[Self]
    ) -> Any:
        # Before 2.14, pydantic cannot serialise a nested config whose class was not built for itself.
        (type(data) if isinstance(data, BaseModel) else cls).model_rebuild()
        if isinstance(data, BaseModel):
            return handler(data)
        data = cls._as_mapping(data)
        chosen = cls.class_for(data)
        if chosen is not cls:
            return chosen.model_validate(data)
        known = set(cls.known_keys())
        unknown = [key for key in data if key not in known]
        if unknown:
            raise ValidationError.from_exception_data(
                cls.__name__, [cls._unknown_key(str(key), data) for key in unknown]
            )
        return handler(data)

    @classmethod
    def checked(cls, value: Any) -> Self:
        """Return a config, or its options as one, validated; ConfigError with one line per mistake."""
        try:
            return cls.model_validate(value)
        except ValidationError as error:
            raise ConfigError("\n".join(explain(error))) from error

    @classmethod
    def _unknown_key(cls, key: str, data: Any) -> InitErrorDetails:
        known = list(cls.known_keys())
        section, _, rest = key.partition(".")
        if section in known and rest:
            nested = f"{section}: {{{rest.replace('.', ': {')}: ...{'}' * key.count('.')}"
            return _mistake(shorten(key), f"is one key with a dot; nest it: {nested}", data)
        message = f"unknown{nearest_or_all(key, known)}"
        return _mistake(shorten(key), message, data, kind=UNKNOWN_KEY)

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        if not isinstance(data, Mapping):
            raise PydanticCustomError(
                "not_a_mapping",
                "must be a mapping of options, got {got}{hint}",
                {"got": show(data), "hint": cls.wrong_value_hint},
            )
        return data

    @classmethod
    def class_for(cls, data: Mapping[Any, Any]) -> type[Config]:
        """Return the class that validates `data`: a member for the root of a family, otherwise this class."""
        return cls

    @classmethod
    def known_keys(cls) -> Iterable[str]:
        return cls.model_fields

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        schema = handler(core_schema)
        properties = handler.resolve_ref_schema(schema)["properties"]
        for name, text in help_texts(cls).items():
            if text:
                properties[name]["description"] = text
        return schema

    def notes(self) -> tuple[str, ...]:
        """Return comments that `--print-config` prints above the YAML."""
        return ()

    def model_dump(self, **arguments: Any) -> dict[str, Any]:
        """Return the options as pydantic does, but those of nested configs by their own class."""
        return super().model_dump(**{"serialize_as_any": True, **arguments})

    def model_dump_json(self, **arguments: Any) -> str:
        """Return `model_dump` as JSON."""
        return super().model_dump_json(**{"serialize_as_any": True, **arguments})

    def to_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists, strings and numbers, for YAML files and checkpoints."""
        return self.model_dump(mode="json")

    def to_short_dict(self) -> dict[str, Any]:
        """Return `to_dict` without options at their defaults; every `type` is kept."""
        plain = self.to_dict()
        short: dict[str, Any] = {}
        for name, field in type(self).model_fields.items():
            value = getattr(self, name)
            if name != "type" and value == field.get_default(call_default_factory=True):
                continue
            if isinstance(value, Config):
                short[name] = value.to_short_dict()
            elif isinstance(value, Mapping):
                short[name] = {
                    key: item.to_short_dict() if isinstance(item, Config) else plain[name][key]
                    for key, item in value.items()
                }
            else:
                short[name] = plain[name]
        return short


class TaggedConfig(Config, frozen=True):
    """Base of config families, whose `type:` tag selects the member.

    A direct subclass is the root of a family (`FFNConfig`, `RouterConfig`, ...). A subclass of a root
    joins the family under each value of its `type: Literal[...]`. A class outside the package needs no
    registration and no `type` field: its tag is its import path, `my_module:MyConfig` or
    `path/to/file.py:MyConfig`. Validating such a tag imports the module, which runs its code.

    Wherever a family is expected, `swiglu` is short for `{type: swiglu}`.
    """

    type: str
    """Member of the family: a known name, or `my_file.py:ClassName` or `module:ClassName` for a custom
    class."""

    members: ClassVar[dict[str, type[TaggedConfig]]]
    """Registered classes of this family, by tag."""

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
                    f"{cls.__name__}.type: '{tag}' is already the type of {owner.__name__}; choose another "
                    "Literal, or annotate `type: str` to use the import path"
                )
            cls.members[tag] = cls

    @classmethod
    def is_family_root(cls) -> bool:
        return TaggedConfig in cls.__bases__

    @classmethod
    def _as_mapping(cls, data: Any) -> Mapping[Any, Any]:
        if isinstance(data, str):
            data = {"type": data}
        data = super()._as_mapping(data)
        if isinstance(tag := data.get("type"), FileTag):
            return {**data, "type": tag.resolved}
        if (
            "type" not in data
            and cls.model_fields["type"].is_required()
            and not cls.is_family_root()
        ):
            return {"type": tag_of(cls), **data}
        return data

    @classmethod
    def class_for(cls, data: Mapping[Any, Any]) -> type[Config]:
        tag = data.get("type")
        if not cls.is_family_root():
            own_tags = get_args(cls.model_fields["type"].annotation)
            if own_tags and "type" in data and tag not in own_tags:
                # Report only this mistake: the options belong to another class.
                tags = " or ".join(map(repr, own_tags))
                message = f"must be one of {tags}, got {show(tag)}"
                is_ours = cls.__module__.startswith("moe_ffn.")
                if isinstance(tag, str) and ":" in tag and not is_ours:
                    message += f"; annotate `type: str` in {cls.__name__} to use its import path"
                raise errors_at(cls, {"type": message}, data)
            return cls
        if isinstance(tag, str) and tag in cls.members:
            return cls.members[tag]
        known = ", ".join(sorted(cls.members))
        if tag is None:
            similar = [
                key for key in map(str, data) if key != "type" and did_you_mean("type", [key])
            ]
            hint = f", but there is '{similar[0]}'" if similar else ""
            message = f"missing{hint}; one of: {known}, or my_file.py:ClassName"
            raise errors_at(cls, {"type": message}, data)
        if isinstance(tag, str) and ":" in tag:
            try:
                return import_class(tag, family=cls)
            except ConfigError as error:
                raise errors_at(cls, {"type": str(error)}, data) from error
        if isinstance(tag, str) and tag.endswith(".py"):
            message = f"{show(tag)} is a file; name a class in it: {tag}:ClassName"
        elif not isinstance(tag, str):
            message = f"must be a name, got {show(tag)}; known: {known}"
        else:
            message = f"unknown {show(tag)}{did_you_mean(tag, cls.members)}; known: {known}"
            message += cls.wrong_value_hint
        raise errors_at(cls, {"type": message}, data)

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        # A family may contain itself (an MoE's shared expert is an FFN), so pydantic would expand it
        # forever; `json_schema` puts each family in `$defs` once.
        if cls.is_family_root():
            return {FAMILY_KEY: cls.__name__}
        return super().__get_pydantic_json_schema__(core_schema, handler)


def children(value: Any) -> Iterable[tuple[Any, Any]]:
    """Return (key, item) of a config, a mapping, a list or a tuple; nothing for any other value."""
    if isinstance(value, BaseModel | Mapping):
        return value.items() if isinstance(value, Mapping) else value
    return enumerate(value) if isinstance(value, list | tuple) else ()


def mapped(value: Any, function: Callable[[Any], Any]) -> Any:
    """Return plain options with `function(leaf)` for each leaf of their mappings and lists."""
    if isinstance(value, Mapping):
        return {key: mapped(item, function) for key, item in value.items()}
    return (
        [mapped(item, function) for item in value] if isinstance(value, list) else function(value)
    )


def help_texts(cls: type[Config]) -> dict[str, str]:
    """Return each option's `description` or the docstring under it, read from the source on demand:
    pydantic's `use_attribute_docstrings` doubles the time of `import moe_ffn`.
    """
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        docstrings = _docstrings(base)
        texts |= {name: docstrings.get(name, "") for name in inspect.get_annotations(base)}
    return {
        name: field.description or texts.get(name, "") for name, field in cls.model_fields.items()
    }


@cache
def _docstrings(cls: type) -> dict[str, str]:
    """Return field -> the docstring under it; empty without source code, as for a class from a shell."""
    if not issubclass(cls, Config):
        return {}
    try:
        tree = ast.parse(dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):
        return {}
    body = getattr(tree.body[0], "body", [])
    texts: dict[str, str] = {}
    for statements in pairwise(body):
        match statements:
            case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                texts[name] = inspect.cleandoc(text)
            case _:
                pass
    return texts


def require_count(value: object, name: str) -> None:
    """Raise ConfigError naming the option `name` unless `value` is a whole number from 1 to `MAX_COUNT`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a whole number, got {show(value)}")
    if value < 1:
        raise ConfigError(f"{name} must be at least 1, got {value}")
    if value > MAX_COUNT:
        raise ConfigError(f"{name} must be at most {MAX_COUNT}, got {value}")


def describe_options(config: Config, without: Iterable[str] = ()) -> str:
    """Format options as `k=2, scale=1.0` for a module's repr; null, false and 0 are left out."""
    values = {name: value for name, value in config if value and name not in without}
    return ", ".join(
        f"{name}=({describe_options(value)})" if isinstance(value, Config) else f"{name}={value}"
        for name, value in values.items()
    )


def errors_at(cls: type[Config], messages: Mapping[str, str], data: Any) -> ValidationError:
    """Build a ValidationError with a message for each wrong key of `cls`, for validators to raise."""
    details = [_mistake(key, message, data) for key, message in messages.items()]
    return ValidationError.from_exception_data(cls.__name__, details)


def _mistake(key: str, message: str, data: Any, kind: Any = "config") -> InitErrorDetails:
    error = PydanticCustomError(kind, "{message}", {"message": message})
    return InitErrorDetails(type=error, loc=(key,), input=data)


def json_schema(root: type[Config]) -> dict[str, Any]:
    """Return the JSON schema of `root`, with each family as an `anyOf` over its registered members."""
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
        if FAMILY_KEY not in node:
            return {key: resolve(value) for key, value in node.items()}
        name = node[FAMILY_KEY]
        if name not in definitions:
            definitions[name] = {}  # set first, since a member may contain its own family
            family = families[name]
            members = [define(member) for member in dict.fromkeys(family.members.values())]
            custom_class = {
                "type": "object",
                "required": ["type"],
                "properties": {"type": {"type": "string", "pattern": ":"}},
            }
            definitions[name] = {"anyOf": [*members, {"enum": list(family.members)}, custom_class]}
        rest = {key: resolve(value) for key, value in node.items() if key != FAMILY_KEY}
        return {"$ref": f"#/$defs/{name}", **rest}

    return {**define(root), "$defs": definitions}
