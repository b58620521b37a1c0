""""""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from moe_ffn import Decoder, DecoderConfig
from moe_ffn.data.batches import TrainBatches, ValidationBatches
from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.training.data_module import FILLER, TokenData, TrainLoader, ValidationLoader
from moe_ffn.training.module import LanguageModel, LoadedBatch, ModuleOptions
from moe_ffn.training.objective import IGNORED_TARGET, mask_tokens
from tests.helpers.fitted import MakeConfig


@pytest.fixture
def batches(prepared: PreparedData) -> TrainBatches:
    return TrainBatches(prepared.train, seq_len=16, batch_size=4, seed=0)


@pytest.fixture
def validation(prepared: PreparedData) -> ValidationBatches:
    # 5 sequences of 16 tokens, two to a batch: 2 + 2 + 1.
    return ValidationBatches(prepared.validation, seq_len=16, batch_size=2, num_tokens=80)


def test_train_loader_begins_at_start(batches: TrainBatches) -> None:
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


# -- the masked-token objective: what is hidden, how, and that a model which sees both sides learns by it

MASK = 1000


def masked(fraction: float = 0.15, seed: int = 0, length: int = 400) -> tuple[Tensor, ...]:
    token_ids = torch.arange(8 * length).view(8, length) % MASK
    generator = torch.Generator().manual_seed(seed)
    inputs, targets = mask_tokens(token_ids, fraction, MASK, generator)
    return token_ids, inputs, targets


def test_every_sequence_has_the_same_share_to_guess() -> None:
    _, _, targets = masked()
    assert ((targets != IGNORED_TARGET).sum(dim=1) == 60).all()  # 0.15 * 400
    _, _, targets = masked(length=12)
    assert ((targets != IGNORED_TARGET).sum(dim=1) == 2).all(), "0.15 * 12 is 1.8"


def test_the_target_is_the_token_and_the_rest_is_shown_as_it_is() -> None:
    token_ids, inputs, targets = masked()
    guessed = targets != IGNORED_TARGET
    assert torch.equal(targets[guessed], token_ids[guessed])
    assert torch.equal(inputs[~guessed], token_ids[~guessed])


def test_eighty_percent_are_masked_ten_replaced_and_ten_kept() -> None:
    token_ids, inputs, targets = masked(0.5, length=4000)  # 16,000 to guess
    guessed = targets != IGNORED_TARGET
    shown, true = inputs[guessed], token_ids[guessed]
    # Deviation of a share of 0.8 or 0.1 among 16,000: at most 0.0032.
    assert (shown == MASK).float().mean().item() == pytest.approx(0.8, abs=0.012)
    assert (shown == true).float().mean().item() == pytest.approx(0.1, abs=0.012)
    others = shown[(shown != MASK) & (shown != true)]
    assert others.min() >= 0
    assert others.max() < MASK
    assert len(others.unique()) > 500


def test_at_least_one_token_is_guessed() -> None:
    _, _, targets = masked(0.001, length=20)
    assert ((targets != IGNORED_TARGET).sum(dim=1) == 1).all()


def test_the_same_seed_hides_the_same_tokens() -> None:
    inputs = masked(seed=1)[1]
    assert torch.equal(masked(seed=1)[1], inputs)
    torch.set_default_dtype(torch.bfloat16)  # as in training with bf16-true, and not in evaluation
    try:
        assert torch.equal(masked(seed=1)[1], inputs)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(masked(seed=1)[1], masked(seed=2)[1])


# -- the model that guesses


def decoder(causal: bool) -> Decoder:
    torch.manual_seed(0)
    config = {"d_model": 16, "num_layers": 1, "causal": causal, "attention": {"num_heads": 2}}
    return DecoderConfig.model_validate({**config, "ffn": "dense"}).build(11, 8).double()


def test_only_a_noncausal_model_sees_later_tokens() -> None:
    ids = torch.arange(8).view(1, 8)
    altered = ids.clone()
    altered[0, 7] = 10
    for causal in (True, False):
        model = decoder(causal)
        changed = (model(altered).logits - model(ids).logits)[0, 0].abs().max()
        assert (changed > 1e-9) == (not causal)


def test_the_mask_has_its_own_embedding_and_no_logit() -> None:
    model = decoder(causal=False)
    assert model.mask_token_id == 11
    assert model.mask_embedding is not None
    hidden = torch.tensor([[0, 11, 2]])
    model(hidden).logits.sum().backward()
    assert model(hidden).logits.shape == (1, 3, 11)
    assert model.mask_embedding.grad is not None
    assert model.mask_embedding.grad.count_nonzero() > 0
    assert decoder(causal=True).mask_embedding is None


@pytest.fixture
def masked_module(make_config: MakeConfig) -> LanguageModel:
    config = make_config(model={"causal": False, "ffn": "dense"})
    options = ModuleOptions(
        config.model,
        config.optimizer,
        config.objective,
        config.trainer.guard,
        max_seq_len=16,
        max_steps=4,
        seed=0,
    )
    return LanguageModel(options, torch.ones(11))


def test_validation_masks_the_same_tokens_every_time(masked_module: Any) -> None:
    ids = torch.randint(11, (4, 16))
    batch = LoadedBatch(index=3, input_ids=ids, target_ids=ids)
    values = []
    for place in (0, 1):  # among the batches of this rank, which other ranks change
        masked_module.validation_step(batch, place)
        values.append(masked_module.validation_metrics.compute()["loss"])
        masked_module.validation_metrics.reset()
    assert values[0] == values[1]


def test_a_filler_batch_counts_for_nothing(masked_module: Any) -> None:
    ids = torch.randint(11, (4, 16))
    filler = torch.full_like(ids, IGNORED_TARGET)
    masked_module.validation_step(LoadedBatch(index=-1, input_ids=ids, target_ids=filler), 0)
    assert masked_module.validation_metrics.num_tokens == 0


def test_a_window_has_the_mean_loss_of_its_guesses(masked_module: Any) -> None:
    """A model that prefers no token misses each by ln V, in windows of any number of guesses."""
    with torch.no_grad():
        masked_module.decoder.unembedding.weight.zero_()
    ids = torch.randint(11, (5, 16))
    targets = ids.clone()
    targets[4] = IGNORED_TARGET  # a filler
    found = masked_module.validation_step(
        LoadedBatch(index=0, input_ids=ids, target_ids=targets), 0
    )
    assert found["window_losses"].tolist() == pytest.approx([math.log(11)] * 4 + [0])
