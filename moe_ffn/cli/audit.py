"""Check a mixture of experts for silent defects: experts that are not trained, not adapted, not balanced, not
loaded, in another order, or computed wrong.

moe-ffn audit TARGET [--text FILE] [--html FILE] [--json FILE]

TARGET is a run, a model folder of moe_ffn or of transformers, or a folder with an adapter of peft. The exit
code is 1 if a check fails.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from moe_ffn.cli.exit import EXIT_FAILED
from moe_ffn.cli.parser import (
    Parser,
    json_file,
    page_file,
    versions,
    whole,
    write_json,
    write_output,
)
from moe_ffn.config.errors import ConfigError, command, first_line
from moe_ffn.config.trust import accepting_code
from moe_ffn.interop.audit import audit
from moe_ffn.interop.audit.findings import LOADING, AuditReport, Finding, Verdict, places
from moe_ffn.interop.live_models import (
    ADAPTER_CONFIG,
    base_of_adapter,
    encode_utf8,
    is_adapter_folder,
    is_transformers_folder,
    load_adapter,
    load_hf_tokenizer,
    load_with_info,
    max_length_of,
)
from moe_ffn.report.html import render
from moe_ffn.report.inspect.text import text_of_run
from moe_ffn.runs.texts import read_text_bytes
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.weights.open_model import open_model
from moe_ffn.weights.pretrained import require_known_ids

STYLES: dict[Verdict, str] = {"fail": "bold red", "warn": "yellow", "pass": "green", "skip": "dim"}
"""Verdict -> style in the terminal."""


_OTHER_SHAPE = "have another shape in the files"
"""Part of a finding, because of which a model may not be computable at all."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("audit"), description=__doc__)
    parser.add("target TARGET", "folder of a run, a model or an adapter", type=Path)
    parser.add(
        "--text FILE",
        "text to run the model on (default: the validation split of a run, else some Python source)",
    )
    meaning = "number of tokens of the text (default: %(default)s)"
    parser.add("--tokens N", meaning, type=whole(4, 1 << 20), default=1024)
    parser.add("--base FOLDER", "model that an adapter belongs to")
    parser.add("--html FILE", "also write a page", type=page_file)
    parser.add("--json FILE", "also write the findings as JSON", type=json_file)
    parser.add_trust()
    args = parser.parse_args(argv)
    with accepting_code(args.trust_code):
        target = load_target(
            args.target, args.text, args.tokens, args.base, trust_code=args.trust_code
        )
        try:
            report = audit(
                target.model, target.ids_BS, objective=target.objective, num_steps=target.num_steps
            )
        except RuntimeError as error:
            misshapen = [found for found in target.findings if _OTHER_SHAPE in found.sentence]
            if not misshapen or isinstance(error, torch.OutOfMemoryError):
                raise
            raise ConfigError(
                f"'{args.target}' cannot be computed ({first_line(error)}): {misshapen[0].sentence}; "
                f"{misshapen[0].advice}"
            ) from error
    facts = {"text": target.text, "versions": versions("transformers", "peft")}
    report = replace(
        report, findings=(*target.findings, *report.findings), facts={**report.facts, **facts}
    )
    print_report(report, Console(highlight=False))
    if args.html is not None:
        html = render("audit.html", report=report, target=args.target.resolve().name)
        write_output("--html", args.html, html)
    if args.json is not None:
        write_json(args.json, report.to_dict())
    return 0 if report.ok else EXIT_FAILED


def print_report(report: AuditReport, console: Console) -> None:
    """Print the verdict, what was audited, and a table of the findings."""
    console.print(report.summary, markup=False, style="bold")
    facts = (f"{name}: {value}" for name, value in report.facts.items())
    console.print(f"{'; '.join((report.model, *facts))}\n", markup=False, style="dim")
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    for name in ("verdict", "check", "place"):
        table.add_column(name, no_wrap=name != "place", max_width=24, overflow="fold")
    table.add_column("finding", ratio=1, overflow="fold")
    for row in report.rows():
        finding = Text(row.sentence)
        if row.advice:
            finding.append(f"\n-> {row.advice}", style="bold")
        table.add_row(Text(row.verdict, STYLES[row.verdict]), row.check, row.place, finding)
    console.print(table)


# -- loading

MAX_LENGTH = 256
"""Longest sequence of a batch."""


@dataclass(frozen=True)
class Target:
    """A model to audit, with a batch of text."""

    model: nn.Module
    ids_BS: Tensor
    text: str
    """Name of the text, for the report."""
    findings: tuple[Finding, ...] = ()
    """Findings from loading."""
    objective: ObjectiveConfig | None = None
    """Balancing of a run."""
    num_steps: int | None = None
    """Steps of a run."""


def load_target(
    folder: Path,
    text: Path | None,
    num_tokens: int,
    base: Path | None = None,
    *,
    trust_code: bool = False,
) -> Target:
    """Load a run, a model or an adapter, and a text of about `num_tokens` tokens.

    The default text is the validation split of a run, or one that comes with Python. `base` is the folder of
    the model of an adapter whose config names none. Raises ConfigError if the folder or the text cannot be
    read, or they do not belong together.
    """
    if is_adapter_folder(folder):
        return _adapter(folder, text, num_tokens, base, trust_code)
    if base is not None:
        raise ConfigError(
            f"--base: '{folder}' is not an adapter of peft, which has {ADAPTER_CONFIG}; leave it out"
        )
    if is_transformers_folder(folder):
        model, info = load_with_info(folder, accepts_encoder=True)
        encode = partial(encode_utf8, load_hf_tokenizer(folder)[0])
        batch = _batch(encode, text, num_tokens, max_length_of(model))
        vocab_size = model.get_input_embeddings().num_embeddings
        require_known_ids(batch[0].flatten().tolist(), vocab_size, folder)
        return Target(model, *batch, _loading(info))
    ours = open_model(folder, trust_code=trust_code)
    decoder, run = ours.decoder, ours.run
    if run is not None and text is None:
        ids_BS = torch.from_numpy(text_of_run(run, num_tokens).windows).long()
        batch = ids_BS, "validation split"
    else:
        batch = _batch(ours.tokenizer.encode, text, num_tokens, decoder.max_seq_len)
    if run is None:
        return Target(decoder, *batch)
    return Target(decoder, *batch, objective=run.config.objective, num_steps=run.step)


def _loading(info: dict[str, Any]) -> tuple[Finding, ...]:
    """Return findings on weights that transformers did not find, did not use, or could not fit."""
    wrong: tuple[tuple[str, Verdict, str], ...] = (
        ("missing_keys", "fail", "are not in the files, and are random"),
        ("mismatched_keys", "fail", f"{_OTHER_SHAPE}, and are random"),
        ("unexpected_keys", "warn", "are in the files, but the model does not use them"),
    )
    mismatched = [
        f"{name} {tuple(found)}, not {tuple(expected)}"
        for name, found, expected in info.get("mismatched_keys", ())
    ]
    info = {**info, "mismatched_keys": mismatched}
    findings = [
        LOADING.finding(
            verdict,
            f"{len(info[key])} tensors {what}: {places(sorted(map(str, info[key])))}",
            "convert or download the folder again",
        )
        for key, verdict, what in wrong
        if info.get(key)
    ]
    passed = LOADING.passes("the files have every tensor of the model, and no other")
    return (*findings,) or (passed,)


def _adapter(
    folder: Path, text: Path | None, num_tokens: int, base: Path | None, trust_code: bool
) -> Target:
    named = base_of_adapter(folder)
    base = base or (None if named is None else Path(named))
    if base is None or not base.is_dir():
        whose = (
            f"is an adapter for '{named}', which is not a folder here"
            if named
            else "names no base model"
        )
        raise ConfigError(f"'{folder}' {whose}; give the folder of that model with --base")
    target = load_target(base, text, num_tokens, trust_code=trust_code)
    adapted = load_adapter(folder, target.model, base, is_trainable=True)
    findings = [
        LOADING.fails(
            f"{len(names)} tensors of the adapter {what}: {places(names)}",
            "load it with the versions of peft and transformers that saved it, or train it again",
        )
        for names, what in (
            (adapted.unused, "match nothing in the model and have no effect"),
            (adapted.missing, "are not in its file, and are random"),
        )
        if names
    ] or [LOADING.passes("every tensor of the adapter has its place")]
    if named is not None and Path(named).is_dir() and not Path(named).samefile(base):
        findings.append(
            LOADING.warns(
                f"the adapter was trained on '{named}', and is audited on '{base}'",
                "leave --base out, unless both are the same model",
            )
        )
    return replace(target, model=adapted.model, findings=(*target.findings, *findings))


def _batch(
    encode: Any, text: Path | None, num_tokens: int, max_length: int | None
) -> tuple[Tensor, str]:
    """Return the first `num_tokens` tokens of a text as sequences of equal length, and its name."""
    if text is None:
        content = inspect.getsource(statistics).encode()
        name = "source of Python's statistics module"
    else:
        content, name = read_text_bytes(text), text.name
    ids = torch.as_tensor(encode(content)[:num_tokens], dtype=torch.int64)
    length = min(MAX_LENGTH, max_length or MAX_LENGTH, len(ids) // 2)  # two sequences or more
    if length < 2:
        raise ConfigError(f"--text: '{name}' has {len(ids)} tokens; give a text of four or more")
    return ids[: len(ids) // length * length].view(-1, length), name
