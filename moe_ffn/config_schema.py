"""The JSON schema of a config, by which an editor completes and checks its YAML."""

from __future__ import annotations

from typing import Any

from moe_ffn.config import FAMILY_KEY, Config, TaggedConfig


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
        if FAMILY_KEY not in node:
            return {key: resolve(value) for key, value in node.items()}
        name = node[FAMILY_KEY]
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
        rest = {key: resolve(value) for key, value in node.items() if key != FAMILY_KEY}
        return {"$ref": f"#/$defs/{name}", **rest}

    return {**define(root), "$defs": definitions}
