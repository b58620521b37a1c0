"""A run's best model, read back from its folder."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.errors import ConfigError, first_line
from moe_ffn.files import read_text
from moe_ffn.import_path import explaining_outside_errors
from moe_ffn.model.decoder import Decoder, DecoderOutput
from moe_ffn.runs.checkpoints import best_checkpoint, newest_good, refusal_of_weights
from moe_ffn.runs.config import TrainConfig, own_config
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, CONFIG_FILE, TOKENIZER_FILE, check_has_weights
from moe_ffn.runs.outside_code import say_changed_code
from moe_ffn.runs.record import RunRecord, identity_of_weights
from moe_ffn.training.recovery.checkpoint_file import IDENTITY, CheckpointError, newest_first

_PREFIX = "decoder."


@dataclass(frozen=True)
class SavedModel:
    """The best model of a run, in evaluation, with what it takes to give it a text."""

    folder: Path
    config: TrainConfig
    tokenizer: Tokenizer
    decoder: Decoder

    def run(self, text: bytes, *, who: str = "text") -> DecoderOutput:
        """What the decoder makes of a text as one sequence.

        Args:
            who: how the text is called where it is refused, such as an option's name.

        Raises:
            ConfigError: it has more tokens than the sequences that the run was trained on.
        """
        ids = self.tokenizer.encode(text).tolist()
        if len(ids) > self.decoder.max_seq_len:
            raise ConfigError(
                f"{who}: has {len(ids)} tokens, but '{self.folder}' was trained on sequences of "
                f"{self.decoder.max_seq_len} (data.seq_len); give a shorter text"
            )
        with torch.no_grad():
            return self.decoder(torch.tensor([ids]))


def load_model(folder: Path, *, trust_code: bool = False) -> SavedModel:
    """The config, the tokenizer and the best weights of a run.

    Args:
        trust_code: run the code that the folder names, whoever's it is.

    Raises:
        ConfigError: this is no run's folder, or one without a good checkpoint, or a file of it is damaged,
            or it names code that nobody trusts.
    """
    check_has_weights(folder)
    config = own_config(folder / CONFIG_FILE, trust_code=trust_code)
    say_changed_code(folder)
    tokenizer = _read_tokenizer(folder / TOKENIZER_FILE, config)
    with explaining_outside_errors():
        decoder = config.model.build(tokenizer.vocab_size, config.data.seq_len)
    expected = identity_of_weights(config, tokenizer)
    record = RunRecord.read(folder, config)
    weights = _weights(folder / CHECKPOINTS_FOLDER, decoder, expected, record)
    # float32 holds the weights of every other format exactly.
    if any(weights[name].dtype == torch.float64 for name, _ in decoder.named_parameters()):
        decoder.double()
    decoder.load_state_dict(weights)
    return SavedModel(folder, config, tokenizer, decoder.eval())


def _weights(
    checkpoints: Path, decoder: Decoder, expected: Mapping[str, Any], record: RunRecord
) -> Mapping[str, Tensor]:
    """The best, or the newest where those are damaged."""
    found, passed_over = newest_good(
        [*best_checkpoint(checkpoints), *newest_first(checkpoints)],
        lambda values: (
            refusal_of_weights({**values, "state_dict": _of_decoder(values)}, expected, decoder)
            or record.refusal(values[IDENTITY])
        ),
    )
    why = "; ".join(passed_over)
    if found is not None:
        if why:
            print(f"{checkpoints}: {why}; taking {found.path.name}", file=sys.stderr)
        return _of_decoder(found.values)
    raise ConfigError(
        f"'{checkpoints}' has no good checkpoint: {why}; put back what was there, or give another run"
        if why
        else f"'{checkpoints}' has no checkpoint, so no model to load; give a run that has come to its "
        "first validation"
    )


def _of_decoder(values: Mapping[str, Any]) -> dict[str, Any]:
    state = values.get("state_dict")
    if not isinstance(state, Mapping):
        raise CheckpointError("lacks 'state_dict', so it is no checkpoint of a run")
    return {
        name.removeprefix(_PREFIX): value
        for name, value in state.items()
        if str(name).startswith(_PREFIX)
    }


def _read_tokenizer(path: Path, config: TrainConfig) -> Tokenizer:
    try:
        values = json.loads(read_text(path))
        return config.data.tokenizer.restore(values)
    except Exception as error:  # of whatever kind: what is wrong is in the file
        raise ConfigError(
            f"'{path}' is not the tokenizer that this run was trained with: {first_line(error)}"
        ) from error
