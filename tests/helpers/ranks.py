"""Functions run on several ranks of one machine, each a process, joined by gloo, or by NCCL on GPUs."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import pickle
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ffn.model.decoder import Decoder
from moe_ffn.training.parallel.layout import Layout
from moe_ffn.training.parallel.sharding import Sharder

SECONDS = 60


def on_ranks(
    num_ranks: int,
    folder: Path,
    function: Callable[..., Any],
    *given: Any,
    device: str = "cpu",
) -> list[Any]:
    """Return the results of `function(rank, *given)` on each rank; their tensors have no graph.

    Args:
        device: `cpu`, or `cuda`: a GPU for each rank, where `function` is one of a module.

    Raises:
        AssertionError: it raised on a rank, with the traceback of that.
    """
    # Imported once, and not in each process: the first collective does it, for seconds.
    importlib.import_module("torch._dynamo")
    # CUDA does not outlive a fork.
    context: Any = multiprocessing.get_context("fork" if device == "cpu" else "spawn")
    folder.mkdir(parents=True, exist_ok=True)
    pipes, processes = [], []
    for rank in range(num_ranks):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (rank, num_ranks, folder / "store", theirs, function, given, device)
        process = context.Process(target=_run, args=arguments, daemon=True)
        process.start()
        pipes.append(ours)
        processes.append(process)
    results: list[Any] = []
    try:
        for rank, pipe in enumerate(pipes):
            assert pipe.poll(SECONDS), f"rank {rank} says nothing for {SECONDS} s"
            problem, result = pickle.loads(pipe.recv_bytes())
            assert not problem, f"rank {rank}: {problem}"
            results.append(result)
        for process in processes:
            process.join(SECONDS)
            assert process.exitcode == 0
    finally:
        for process in processes:
            process.kill()  # a rank that waits for one that failed would slow down all later tests
    return results


def torchrun_variables(rank: int, num_ranks: int, port: int = 0) -> dict[str, str]:
    return {
        **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks)),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }


def parallelize(decoder: Decoder, layout: Layout) -> None:
    """Divide a decoder over the ranks that are there."""
    sharder = Sharder(layout, "cpu")
    for layer in decoder.layers:
        sharder.shard_layer(layer)
    sharder.shard_rest(decoder)


def _run(
    rank: int,
    num_ranks: int,
    store: Path,
    pipe: Any,
    function: Callable[..., Any],
    given: Any,
    device: str,
) -> None:
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(False)  # which a Trainer of another test may have left on
    os.environ |= torchrun_variables(
        rank, num_ranks
    )  # for Lightning, which takes the group there is
    try:
        if device == "cuda":
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "gloo" if device == "cpu" else "nccl",
            init_method=f"file://{store}",
            rank=rank,
            world_size=num_ranks,
        )
        result = function(rank, *given)
        dist.barrier()  # without it gloo may abort while another rank still reads
        dist.destroy_process_group()
        _send(pipe, "", result)
    except BaseException:
        _send(pipe, traceback.format_exc(), None)


def _send(pipe: Any, problem: str, result: Any) -> None:
    # Not by `pipe.send`, which shares the memory of a process that ends.
    pipe.send_bytes(pickle.dumps((problem, result)))


class Sent(TorchDispatchMode):
    """Bytes that this rank sends to others, by collective, in rings: no more than it has to."""

    def __init__(self, layout: Layout, rank: int) -> None:
        super().__init__()
        self.num_copies, self.place = layout.data, rank % layout.expert
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func).split(".")[1]
        if name == "_allgather_base_":
            whole, part = args[:2]
            self.bytes["gathered"] += whole.nbytes - part.nbytes
        elif name == "_reduce_scatter_base_":
            part, whole = args[:2]
            self.bytes["scattered"] += whole.nbytes - part.nbytes
        elif name == "allreduce_":
            (buffer,) = args[0]
            self.bytes["copies"] += round(2 * (1 - 1 / self.num_copies) * buffer.nbytes)
        elif (
            name == "all_to_all_single" and args[0].shape[-1] > 2
        ):  # tokens; weights have 1, labels 2
            rows, to_ranks = args[0], args[2]
            self.bytes["tokens"] += (len(rows) - to_ranks[self.place]) * rows[:1].nbytes
        return func(*args, **(kwargs or {}))
