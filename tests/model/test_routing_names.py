from __future__ import annotations

import pytest

from moe_ffn.ffn.base import prefix_names, round_name
from moe_ffn.model.decoder import is_inner, layer_name, layer_number, short_name


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        ("layer_03", "3"),
        ("layer_12", "12"),
        ("layer_00/inner", "0 inner"),
        ("layer_00/inner/step_2", "0 inner step_2"),
    ],
)
def test_short_names(layer: str, name: str) -> None:
    assert short_name(layer) == name


def test_another_name_is_shown_as_it_is() -> None:
    assert short_name("encoder/3") == "encoder/3"


def test_names_are_read_as_they_are_given() -> None:
    inner = prefix_names("inner", {"routing": 1, "step_2": 2})
    names = prefix_names(layer_name(7), {"routing": 0} | inner)
    assert names == {"layer_07": 0, "layer_07/inner": 1, "layer_07/inner/step_2": 2}
    assert [layer_number(name) for name in names] == [7, 7, 7]
    assert [is_inner(name) for name in names] == [False, True, True]


def test_a_later_round_of_a_chain_is_no_block_inside_another() -> None:
    assert [round_name(number) for number in range(3)] == ["routing", "round_2", "round_3"]
    assert short_name("layer_03/round_2") == "3 round_2"
    assert not is_inner("layer_03/round_2")
    assert is_inner("layer_03/inner/round_2")


def test_other_names_are_rejected() -> None:
    with pytest.raises(
        ValueError, match=r"the name of a layer must be like 'layer_03' .*, got 'layer_x'"
    ):
        layer_number("layer_x")
