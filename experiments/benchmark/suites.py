"""Suites that time a layer, and count the bytes that it saves for the backward pass.

Relative time is the time of the whole layer (router, plan, experts, combine; gradients of x and all
parameters) over that of a dense block of the width that a token uses, K * F.

T tokens, D model width, E experts, F expert width
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import replace
from itertools import accumulate, product
from typing import Any

import torch
from torch import Tensor, nn

from experiments.benchmark.layers import (
    AUTO,
    DENSE,
    Case,
    Layer,
    compare,
    in_evaluation,
    moe_layer,
    outcome,
    peer_weights,
)
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED, PEERS, TRAINING_PEERS
from experiments.benchmark.session import Candidate, Session, ratio, result
from experiments.benchmark.shapes import Shape

# ------------------------------------------------------------------ one shape after the other

TARGETS = {
    Shape(2048, 512, 512, 8, 2, "fp32"): (1.06, 1.25),
    Shape(2048, 512, 512, 8, 2, "bf16"): (1.06, 1.7),
    Shape(4096, 256, 128, 32, 4, "fp32"): (1.1, 1.25),
    Shape(4096, 256, 128, 32, 4, "bf16"): (1.25, 1.7),
    Shape(2048, 1024, 1024, 8, 2, "fp32"): (1.04, 1.25),
    Shape(4096, 1024, 1024, 8, 2, "bf16"): (1.04, 1.7),
}
"""Shape -> maximum relative time, and minimum speed-up over Hugging Face's grouped_mm."""

RELATIVE_TIME_GOAL = 1.0
"""Relative time to reach in future, for all shapes."""


def rows(session: Session) -> None:
    """A layer at published sizes, forward and backward, with every installed library."""
    time_shapes(session, list(TARGETS))


def time_shapes(session: Session, shapes: Sequence[Shape]) -> None:
    """Print a table, the relative time and the targets for each shape."""
    for shape in shapes:
        session.say(f"\n{shape}, forward and backward")
        case = Case.of(shape, session.device)
        layers = session.layers(case, TRAINING_PEERS)
        results = session.time(
            [Candidate.training(layer, case.tokens, str(shape)) for layer in layers]
        )
        session.show(results, (DENSE, HF_GROUPED))
        ours, dense, peer = ((str(shape), name) for name in (AUTO, DENSE, HF_GROUPED))
        limit, speedup = TARGETS.get(shape, (None, None))
        if limit is None or not session.limits_apply:
            session.say(
                f"  relative time {ratio(results, ours, dense)}, goal {RELATIVE_TIME_GOAL:g}"
            )
        else:
            session.check_target(
                "relative time", limit, results, ours, dense, goal=RELATIVE_TIME_GOAL
            )
        if speedup is not None:
            claim = f"times faster than {HF_GROUPED}"
            session.check_target(claim, speedup, results, peer, ours, at_most=False)


# -------------------------------------------------------------- the number of experts or tokens

MAX_GROWTH = 1.4
"""Maximum ratio of the times with 256 and 8 experts, for the same work."""

MAX_EAGER_EXPERTS = 64
"""Number of experts up to which eager is timed; its backward pass takes 25 seconds with 256."""


def experts(session: Session) -> None:
    """8 to 256 experts with the same total active width."""
    base = Shape(8192, 256, 256, 8, 2, "fp32")
    sizes = {f"E {e}": replace(base, num_experts=e) for e in (8, 16, 32, 64, 128, 256)}
    session.say(f"{base} and more experts, forward and backward, median")
    candidates: list[Candidate] = []
    for name, shape in sizes.items():
        few = shape.num_experts <= MAX_EAGER_EXPERTS
        case = Case.of(shape, session.device)
        layers = session.layers(case, (HF_EAGER, HF_GROUPED) if few else (HF_GROUPED,))
        candidates += [Candidate.training(layer, case.tokens, name) for layer in layers]
    results = session.time(candidates)
    session.show_grid(results)
    taxes = [ratio(results, (name, AUTO), (name, DENSE)) for name in sizes]
    session.say(f"  {AUTO} / {DENSE}: {', '.join(taxes)}")
    most, fewest = ("E 256", AUTO), ("E 8", AUTO)
    session.check_target("time at 256 experts / at 8", MAX_GROWTH, results, most, fewest)


NUM_CALLS = 20
"""Calls per timed run, because one takes a fraction of a millisecond."""


def decoding(session: Session) -> None:
    """1 to 16 tokens, forward only."""
    base, narrow = Shape(1, 512, 512, 8, 2, "fp32"), Shape(1, 256, 128, 32, 4, "fp32")
    session.say(f"{base}, {narrow} and more tokens, forward only, evaluation mode, median per call")
    sizes = {
        f"T {t}{', narrow' * (shape is narrow)}": replace(shape, num_tokens=t)
        for shape in (base, narrow)
        for t in (1, 2, 4, 8, 16)
    }
    candidates: list[Candidate] = []
    for name, shape in sizes.items():
        case = Case.of(shape, session.device)
        sparse = session.layers(case, (HF_EAGER, HF_GROUPED, HF_BATCHED))[1:]
        layers = (in_evaluation(layer, case) for layer in sparse)
        candidates += [Candidate.evaluation(each, case.tokens, name, NUM_CALLS) for each in layers]
    results = session.time(candidates)
    session.show_grid(results)
    for name in sizes:
        for peer in (HF_EAGER, HF_BATCHED):
            claim = f"time / {peer}, {name}"
            session.check_target(claim, 1.0, results, (name, AUTO), (name, peer))


# ---------------------------------------------------------------------------------------- skew

SKEWED = Shape(8192, 256, 512, 8, 1, "fp32")
"""k = 1, so that one expert can receive all tokens."""

SKEWS = {"balanced": 0.0, "half": 0.5, "one hot": 1.0}
"""Name -> share of tokens that the first expert receives; the other tokens go to all experts in turn."""


def skew(session: Session) -> None:
    """A balanced load, or half of the tokens or all tokens on one expert."""
    session.say(f"{SKEWED}, with three loads, forward and backward, median")
    candidates: list[Candidate] = []
    for load, share in SKEWS.items():
        case = Case.of(SKEWED, session.device, type="forced", k=SKEWED.k, skew=share)
        layers = session.layers(case)[1:]
        candidates += [Candidate.training(layer, case.tokens, load) for layer in layers]
    results = session.time(candidates)
    session.show_grid(results)
    one, balanced = ("one hot", AUTO), ("balanced", AUTO)
    session.check_target("time on one expert / balanced", 1.0, results, one, balanced)


# ---------------------------------------------------------------------------------------- memory

WIDE, NARROW = Shape(2048, 512, 512, 8, 2, "fp32"), Shape(4096, 256, 128, 32, 4, "fp32")

MAX_SAVED = 0.5
"""Maximum saved bytes, relative to the smaller of Hugging Face's eager and grouped_mm."""


def memory(session: Session) -> None:
    """Bytes that a layer saves for its backward pass."""
    for shape in (WIDE, NARROW, replace(WIDE, dtype="bf16")):
        session.say(f"\n{shape}, saved for the backward pass")
        case = Case.of(shape, session.device)
        layers = session.layers(case, (HF_EAGER, HF_GROUPED))
        results = {
            (str(shape), layer.name): result(
                [saved_bytes(layer.module, case.tokens.x_BSD)], "B", layer.computes
            )
            for layer in layers
        }
        session.show(results)
        ours, *peers = ((str(shape), name) for name in (AUTO, HF_EAGER, HF_GROUPED))
        timed = [peer for peer in peers if peer in results]
        smallest = min(timed, key=lambda peer: results[peer].median, default=peers[-1])
        claim = "bytes / bytes of HF eager or grouped_mm"
        session.check_target(claim, MAX_SAVED, results, ours, smallest, anywhere=True)


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Return the bytes of the storages that autograd saves in the forward pass.

    Each counts once; parameters and the input do not count, nor tensors that a function keeps outside of
    autograd.
    """

    def address(tensor: Tensor) -> int:
        return tensor.untyped_storage().data_ptr()

    uncounted = {address(tensor) for tensor in (x, *module.parameters())}
    # Holding the tensors prevents reuse of their addresses.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved[address(tensor)] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(saved[key].untyped_storage().nbytes() for key in saved.keys() - uncounted)


# -------------------------------------------------------------------------------------- adapters

ADAPTED = Shape(2048, 256, 128, 64, 4, "fp32")
RANK = 16
FUSED, PEFT, PEFT_ON_HF = "fuse_adapters", "peft on our kernels", "peft on HF grouped_mm"

TOKENS = (256, 512, 1024, 2048)

MAX_ADAPTED = 0.5
"""Maximum ratio of time and peak memory to peft's."""


def adapters(session: Session) -> None:
    """A training step of LoRA on experts, by `fuse_adapters` and by peft alone; needs peft."""
    try:
        from peft import LoraConfig, get_peft_model

        from moe_ffn.interop import fuse_adapters
    except ImportError:
        session.say("not measured, because peft is not installed")
        return
    sizes = {f"T {t}": replace(ADAPTED, num_tokens=t) for t in TOKENS}
    session.say(f"{ADAPTED} and fewer tokens, rank {RANK}, forward and backward, median")

    def adapted(module: nn.Module, *names: str) -> nn.Module:
        config = LoraConfig(
            r=RANK,
            init_lora_weights=False,
            target_modules=[],
            target_parameters=[f"experts.{name}" for name in names],
        )
        torch.manual_seed(0)
        # A copy, because peft changes the module that it is given.
        return get_peft_model(deepcopy(module), config)

    candidates: list[Candidate] = []
    for name, shape in sizes.items():
        case = Case.of(shape, session.device)
        ours = moe_layer(shape, "auto", session.device)
        ours.load_state_dict(case.source.state_dict())
        modules = {
            PEFT: adapted(ours, "gate_up", "down"),
            FUSED: fuse_adapters(adapted(ours, "gate_up", "down")),
        }
        if PEERS[HF_GROUPED].is_installed:
            theirs = PEERS[HF_GROUPED].build(peer_weights(case.source), shape)
            modules[PEFT_ON_HF] = adapted(theirs, "gate_up_proj", "down_proj")
        expected = outcome(modules[PEFT], case.tokens)
        for layer_name, module in modules.items():
            computes = compare(outcome(module, case.tokens), expected)
            layer = Layer(layer_name, module, computes)
            candidates.append(Candidate.training(layer, case.tokens, name))
    results = session.time(candidates)
    session.show_grid(results)
    session.say("peak memory in addition to weights and input")
    peaks = {
        each.key: result([peak_bytes(each, session.device)], "B", each.computes)
        for each in candidates
    }
    session.show_grid(peaks)
    measured = (("time", results), ("peak memory", peaks))
    for (what, values), base, name in product(measured, (PEFT_ON_HF, PEFT), sizes):
        claim, ours, theirs = f"{what} / {base}, {name}", (name, FUSED), (name, base)
        session.check_target(claim, MAX_ADAPTED, values, ours, theirs, anywhere=what != "time")


def peak_bytes(candidate: Candidate, device: torch.device) -> int:
    """Return the peak of the memory that a run allocates through torch."""
    candidate.reset()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        candidate.run()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiler:
        candidate.run()
    candidate.reset()
    results: Any = getattr(profiler.profiler, "kineto_results")  # noqa: B009  # typed nowhere
    events = results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    return max(accumulate(nbytes for _, nbytes in changes))
