from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch

from moe_ffn.data.batches import TrainBatches, ValidationBatches
from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.training.data_module import FILLER, TokenData, TrainLoader, ValidationLoader
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.objective import IGNORED_TARGET
from tests.helpers.fitted import MakeConfig


@pytest.fixture
def batches(prepared: PreparedData) -> TrainBatches:
    return TrainBatches(prepared.train, seq_len=16, batch_size=4, seed=0)


@pytest.fixture
def validation(prepared: PreparedData) -> ValidationBatches:
    # 5 sequences of 16 tokens, two to a batch: 2 + 2 + 1.
    return ValidationBatches(prepared.validation, seq_len=16, batch_size=2, num_tokens=80)


def test_train_loader_begins_where_start_says(batches: TrainBatches) -> None:
    position = 0
    loader = TrainLoader(batches, num_batches=5, start=lambda: position)

    assert [batch["index"] for batch in loader] == [0, 1, 2, 3, 4]
    position = 3
    assert [batch["index"] for batch in loader] == [3, 4]
    position = 5
    assert list(loader) == []
    assert len(loader) == 5, "the length is that of the run, wherever it begins"


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_each_validation_batch_is_seen_once_and_all_ranks_take_part_equally_often(
    validation: ValidationBatches, world_size: int
) -> None:
    loaders = [ValidationLoader(validation, rank, world_size) for rank in range(world_size)]
    seen = [[batch["index"] for batch in loader] for loader in loaders]

    assert len({len(loader) for loader in loaders}) == 1
    assert [len(indices) for indices in seen] == [len(loader) for loader in loaders]
    assert sorted(i for indices in seen for i in indices if i != FILLER) == [0, 1, 2]
    assert all(indices[0] != FILLER or rank >= 3 for rank, indices in enumerate(seen))


def test_a_filler_has_nothing_to_predict(validation: ValidationBatches) -> None:
    first, filler = ValidationLoader(validation, rank=1, world_size=2)
    assert (first["index"], filler["index"]) == (1, FILLER)
    assert (filler["target_ids"] == IGNORED_TARGET).all()
    assert torch.equal(filler["input_ids"], validation[0].input_ids)
    assert (validation[0].target_ids != IGNORED_TARGET).all(), "the batch itself was changed"


def test_loaders_are_those_of_the_rank_the_seed_and_the_step(
    make_config: MakeConfig, prepared: PreparedData
) -> None:
    data = TokenData(make_config().data, prepared, num_batches=8, seed=5)
    trainer = SimpleNamespace(
        global_rank=1,
        world_size=2,
        global_step=3,
        accumulate_grad_batches=2,
        lightning_module=Mock(spec=LanguageModel),
    )
    data.trainer = cast("Any", trainer)
    # Four sequences of 16 tokens; the second rank has the last two.
    whole = TrainBatches(prepared.train, seq_len=16, batch_size=4, seed=5)

    found = list(data.train_dataloader())

    assert [batch["index"] for batch in found] == [6, 7], "three steps of two batches are over"
    for batch in (*found, trainer.lightning_module.batch_at(1)):
        assert torch.equal(batch["input_ids"], whole[batch["index"]].input_ids[2:])
    assert [batch["index"] for batch in data.val_dataloader()] == [1]


def test_validation_batches_follow_the_config(
    make_config: MakeConfig, prepared: PreparedData
) -> None:
    found = validation_batches(make_config().data, prepared)
    # 96 tokens in sequences of 16, four to a batch
    assert [len(found[i].input_ids) for i in range(len(found))] == [4, 2]
