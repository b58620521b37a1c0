"""A trained model, opened from a model folder or a run, with its tokenizer."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from moe_ffn.config.errors import ConfigError, expand_path, prefix_errors
from moe_ffn.data.tokenizer import FileTokenizerConfig, Tokenizer
from moe_ffn.model.decoder import Decoder, DecoderConfig
from moe_ffn.runs.folder import MODEL_FOLDER, check_is_run, is_run, saved_config
from moe_ffn.runs.reader import Run, load_run
from moe_ffn.weights.pretrained import (
    TOKENIZER_FILE,
    find_tokenizer,
    is_model_folder,
    load_pretrained,
    no_tokenizer,
    read_model_config,
    require_known_ids,
)


@dataclass(frozen=True)
class OpenModel:
    """A trained model, from a model folder or a run."""

    folder: Path
    decoder: Decoder
    """In evaluation mode, on the CPU."""
    found_tokenizer: Tokenizer | None
    """None if the folder has no tokenizer."""
    run: Run | None = None
    """The run; None for a model folder."""
    option: str = ""
    """Option with which the user named a source; messages begin with it."""

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model; raises ConfigError if the folder has none, or that of another model."""
        with prefix_errors(self.option and f"{self.option}: "):
            if self.found_tokenizer is None:
                raise no_tokenizer(self.folder)
            last_id = self.found_tokenizer.vocab_size - 1
            require_known_ids([last_id], self.decoder.embedding.num_embeddings, self.folder)
        return self.found_tokenizer

    @property
    def tokenizer_config(self) -> FileTokenizerConfig:
        """Config of `tokenizer`; the same errors."""
        _ = self.tokenizer
        return FileTokenizerConfig(path=str(self.folder / TOKENIZER_FILE))

    @property
    def precision(self) -> str:
        """Value of `trainer.precision`: that of the run, or of the weights in a model folder."""
        if self.run is not None:
            return self.run.facts.precision or self.run.config.trainer.precision
        dtype = self.decoder.embedding.weight.dtype
        return "bf16-true" if dtype == torch.bfloat16 else f"{8 * dtype.itemsize}-true"

    def require_same_tokens(self, tokenizer: Tokenizer) -> None:
        """Raise ConfigError if a token id stands for different text in `tokenizer`."""
        num_embeddings = self.decoder.embedding.num_embeddings
        advice = "use a folder with the same tokenizer"
        if self.found_tokenizer is not None:
            advice = (
                "use its own: --data.tokenizer '{type: file, path: "
                f"{self.folder / TOKENIZER_FILE}}}'"
            )
            if (size := self.found_tokenizer.vocab_size) != num_embeddings:
                advice = f"its own has {size:,}, so no run can use this model"
        if num_embeddings != tokenizer.vocab_size:
            raise ConfigError(
                f"{self.option}: the model in '{self.folder}' has {num_embeddings:,} tokens, but the "
                f"tokenizer of this run has {tokenizer.vocab_size:,}; {advice}"
            )
        if self.found_tokenizer is None:
            return
        # The model may have rows of embeddings that its tokenizer does not use.
        pairs = zip(self.found_tokenizer.token_bytes, tokenizer.token_bytes, strict=False)
        for token_id, (theirs, ours) in enumerate(pairs):
            if theirs != ours:
                raise ConfigError(
                    f"{self.option}: token {token_id} is {theirs!r:.40} in the tokenizer of '{self.folder}' "
                    f"but {ours!r:.40} in the tokenizer of this run, so the embeddings would belong to other "
                    f"tokens; {advice}"
                )


def open_model(
    folder: Path, *, trust_code: bool = False, wanted: str = "a model or of a run"
) -> OpenModel:
    """Load a model folder, or the best weights of a run; ConfigError if the folder is neither, is damaged, or
    names untrusted code.
    """
    if is_model_folder(folder):
        decoder = load_pretrained(folder, trust_code=trust_code)
        return OpenModel(folder, decoder, find_tokenizer(folder))
    check_is_run(folder, wanted)
    run = load_run(folder, trust_code=trust_code)
    return OpenModel(folder, run.model, run.tokenizer, run)


def read_source(folder: str, option: str, *, trust_code: bool = False) -> OpenModel:
    """Load the model that an option names, see `open_model`; of a run its model folder, if it has one."""
    path = expand_path(folder, option)
    exported = path / MODEL_FOLDER
    with prefix_errors(f"{option}: "):
        if not (is_run(path) and is_model_folder(exported)):
            return replace(open_model(path, trust_code=trust_code), option=option)
        run = load_run(path, trust_code=trust_code)
        _ = run.config  # raises if it names untrusted code, even if the model folder does not
        model = open_model(exported, trust_code=trust_code)
        return replace(model, folder=path, run=run, option=option)


def model_of_source(folder: str, option: str) -> DecoderConfig:
    """Return the config of the model that `read_source` would read, without its weights; the same errors."""
    path = expand_path(folder, option)
    with prefix_errors(f"{option}: "):
        return saved_config(path).model if is_run(path) else read_model_config(path).model


def sha256_of_weights(decoder: Decoder) -> str:
    """Return a digest of the names and values of a decoder's weights."""
    digest = hashlib.sha256()
    for name, weight in decoder.state_dict().items():
        digest.update(name.encode())
        digest.update(weight.cpu().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()
