from __future__ import annotations

import pytest

from moe_ffn.layer_names import is_inner, layer_names, parse_layer, short_name


@pytest.mark.parametrize(
    ("layer", "name"), [("layer_03", "3"), ("layer_12", "12"), ("layer_00/inner", "0 inner")]
)
def test_short_names(layer: str, name: str) -> None:
    assert short_name(layer) == name


def test_another_name_is_shown_as_it_is() -> None:
    assert short_name("encoder/3") == "encoder/3"


def test_names_are_read_as_they_are_given() -> None:
    names = layer_names(7)
    assert parse_layer(names["routing"]) == (7, False)
    assert parse_layer(names["inner_routing"]) == (7, True)
    assert not is_inner(names["routing"])
    assert is_inner(names["inner_routing"])


def test_what_is_no_layer_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a layer is called like 'layer_03' .*, got 'layer_x'"):
        parse_layer("layer_x")
