"""Models of this project in EleutherAI's lm-evaluation-harness (`lm-eval`).

    from moe_ffn.interop.lm_eval import HarnessModel

    lm_eval.simple_evaluate(model=HarnessModel(decoder, tokenizer), tasks=["lambada_openai"], limit=100)

Unlike an export to transformers, which not every model has, this evaluates the model itself.

B requests, S tokens, V vocabulary
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch.nn.utils.rnn import pad_sequence

from moe_ffn.config.errors import ConfigError, did_you_mean, first_line
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.generate import Decoding, Sampling

MAX_NEW_TOKENS = 256
"""Default maximum length of a generated answer, as in lm-eval's own models."""


class HarnessModel(TemplateLM):
    """A causal decoder and its tokenizer as a model of lm-eval; texts without a context follow an end of
    document.
    """

    def __init__(self, decoder: Decoder, tokenizer: Tokenizer, batch_size: int = 16) -> None:
        """Take a decoder in evaluation mode, on its device, and the number of requests in a batch, which
        share the experts' capacity; ConfigError unless it is causal.
        """
        super().__init__()
        if not decoder.config.causal:
            raise ConfigError(
                "model.causal is false: the model predicts masked tokens, but lm-eval needs next-token "
                "predictions; use a run with causal: true"
            )
        self.decoder = decoder
        self.text_tokenizer = (
            tokenizer  # lm-eval expects a tokenizer of transformers as `tokenizer`
        )
        self.batch_size = batch_size
        self.max_length = decoder.max_seq_len
        self._device = decoder.embedding.weight.device

    @property
    def eot_token_id(self) -> int:
        return self.text_tokenizer.end_of_document

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **kwargs: Any
    ) -> list[int]:
        return self.text_tokenizer.encode(string).tolist()

    def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
        windows, owners = [], []  # owner: index of a window's request
        for owner, request in enumerate(requests):
            for window in get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            ):
                windows.append((("", ""), *make_disjoint_window(window)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += value
        return totals

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood in nats, and whether greedy decoding produces it."""
        results: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        # Sorting by length saves padding.
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1] + requests[i][2]))
        for first in range(0, len(order), self.batch_size):
            batch = order[first : first + self.batch_size]
            rows = [self._row(*requests[index][1:]) for index in batch]
            inputs = [torch.tensor(ids[:-1], dtype=torch.long) for ids in rows]
            ids_BS = pad_sequence(inputs, batch_first=True, padding_value=self.eot_token_id)
            mask_BS = pad_sequence(
                [torch.ones_like(ids) for ids in inputs], batch_first=True
            ).bool()
            output = self.decoder(ids_BS.to(self._device), mask=mask_BS.to(self._device))
            for row, index in enumerate(batch):
                end, targets = len(inputs[row]), requests[index][2]
                if not targets:
                    continue
                logits_SV = output.logits[row, end - len(targets) : end]
                targets_S = torch.tensor(targets, device=self._device)
                nats = torch.log_softmax(logits_SV.double(), -1).gather(1, targets_S[:, None])
                is_greedy = bool((logits_SV.argmax(-1) == targets_S).all())
                results[index] = float(nats.sum()), is_greedy
        return results

    def _row(self, context: list[int], continuation: list[int]) -> list[int]:
        """Return the last tokens of a request: the inputs that fit the model, and one token to predict."""
        if len(continuation) > self.max_length:
            raise ConfigError(
                f"a task needs a continuation of {len(continuation)} tokens, but the model reads at most "
                f"{self.max_length} (data.seq_len); leave the task out"
            )
        return (context + continuation)[-(self.max_length + 1) :]

    def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
        return [self._continue(*request.args) for request in requests]

    def _continue(self, context: str, options: Mapping[str, Any]) -> str:
        """Generate the text after `context`, up to the first stop string in `options`."""
        until = options.get("until") or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        do_sample = options.get("do_sample", float(options.get("temperature") or 0) > 0)
        temperature = float(options.get("temperature") or 1) * bool(do_sample)
        top_k, top_p = None, None
        if temperature:  # a greedy task may have limits that do not matter
            top_k = max(int(options.get("top_k") or 0), 0) or None  # -1 means all, as in vLLM
            top_p = options.get("top_p")
        prompt = self.tok_encode(context) or [self.prefix_token_id]
        decoding = Decoding(
            self.decoder,
            [torch.tensor(prompt[-self.max_length :], device=self._device)],
            int(options.get("max_gen_toks") or MAX_NEW_TOKENS),
            Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            torch.Generator(self._device).manual_seed(0),
        )
        text, new_ids = "", list[int]()
        for new in decoding:
            if new[0] == self.eot_token_id:
                break
            new_ids.append(new[0])
            text = self.text_tokenizer.decode(new_ids)
            if any(stop in text for stop in stops):
                break
        return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def evaluate_tasks(model: HarnessModel, tasks: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Measure a model on tasks of lm-eval: folders of task files, or names in these folders or in lm-eval;
    without a name, all tasks of the folders. This also runs the code that a task file names. Return task ->
    `acc`, `word_perplexity` and so on, and known standard errors as `..._stderr`; ConfigError for unknown
    tasks or if they cannot be loaded.
    """
    folders = [task for task in tasks if Path(task).is_dir()]
    manager = TaskManager(include_path=[*folders], include_defaults=False)
    names = [task for task in tasks if task not in folders]
    if unknown := [name for name in names if name not in manager.all_tasks]:
        manager = TaskManager(include_path=[*folders])  # takes seconds: lm-eval has thousands
        for name in unknown:
            if name not in manager.all_tasks:
                hint = did_you_mean(name, manager.all_tasks)
                raise ConfigError(
                    f"--tasks: '{name}' is neither a folder nor a task that lm-eval knows{hint}"
                )
    for folder in folders if not names else []:
        in_folder = TaskManager(include_path=folder, include_defaults=False).all_subtasks
        if not in_folder:
            raise ConfigError(
                f"--tasks: '{folder}' has no task file of lm-eval (.yaml); give another folder"
            )
        names += in_folder
    try:
        results: Any = simple_evaluate(
            model=model,
            tasks=[*names],
            batch_size=model.batch_size,
            log_samples=False,
            task_manager=manager,
        )
    except ConfigError:
        raise
    except Exception as error:  # any type: data sets, templates and custom code may fail
        raise ConfigError(f"--tasks: lm-eval cannot run them: {first_line(error)}") from error
    return {
        name: {
            key.removesuffix(",none"): float(value)
            for key, value in values.items()
            if isinstance(value, int | float) and key not in ("sample_len", "name")
        }
        for name, values in results["results"].items()
    }
