"""The loader and the loss on a GPU, and T1, T2, T5 and T6 at several numbers of threads.

``python -m tools.bench gpu_loader gpu_loss gpu_threads --repeats 3`` takes at most six minutes. Without a CUDA
device the same code runs on the CPU, with smaller inputs, and the table says so.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tools.bench import t01_sample, t05_growth, t06_durable
from tools.bench.report import Figure, Options
from tools.bench.t12_loss import TOKENS, Inputs, make_inputs, ours, step, transcription
from tools.bench.timing import in_turn, ratio, seconds, torch_threads
from tools.bench.workloads import Workload, filled, image, state
from trajstore import TrajectoryReplayBuffer
from trajstore._core.columns.fields import nest
from trajstore._core.feeding.device import CudaDevice
from trajstore._core.feeding.memory import DeviceMemory, Ready, tensors_of
from trajstore.loader import ReplayLoader

STEP = 0.005
"""Seconds of a learner's step."""
ROWS, LONG = 64, 8192
THREADS = (1, 4, 16)
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
LOSS_STREAMS = 12
"""Tensors [B, R] that the loss must move: it reads log_prob, old_log_prob, advantages and both masks; writes four
results with a value per token, and the derivative; the backward pass reads the derivative and writes the gradient."""


def _wait() -> None:
    """Wait until the device has finished."""
    if CUDA:
        torch.cuda.synchronize()


def _waited(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that does some work and waits until the device has finished it."""

    def done() -> None:
        work()
        _wait()

    return done


# ---- the loader ------------------------------------------------------------------------------------


def loader(options: Options) -> Iterator[Figure]:
    """Yield T10 with steps of 5 ms, and the rate of the copy to the device."""
    workload = image(options)
    steps = options.count(600, 5)
    work = _waited(_products(STEP)) if CUDA else partial(time.sleep, STEP)
    arguments: dict[str, Any] = {"device": "cuda"} if CUDA else {"reuse": True}
    with filled(options.folder / "image", workload.trajectories, seed=0) as buffer:
        with ReplayLoader(buffer, workload.batch, **arguments) as batches:
            share = _waiting(batches, work, steps)
        yield Figure("T10", "learner waits in next(), steps of 5 ms", share, 0.02, details={"steps": steps})
        yield _differing(buffer, workload, arguments)
        if CUDA:
            with ReplayLoader(buffer, workload.batch, **arguments) as batches:
                share = _idle(batches, steps)
            yield Figure("T10", "GPU without work, steps of 5 ms launched one ahead", share, 0.02)
            yield from _copies(buffer.sample(workload.batch), "image", options, 0.9)
    workload = state(options)
    with filled(options.folder / "state", workload.trajectories, seed=0) as buffer:
        yield _differing(buffer, workload, arguments)
        if CUDA:
            yield from _copies(buffer.sample(workload.batch), "state", options, None)


def _products(length: float) -> Callable[[], None]:
    """Return what launches matrix products that take about ``length`` seconds."""
    matrix = torch.randn(2048, 2048, device=DEVICE)

    def launch(count: int) -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    many = _waited(partial(launch, 100))
    many()
    return partial(launch, max(1, round(length * 100 / min(seconds(many) for _ in range(3)))))


def _waiting(batches: ReplayLoader, work: Callable[[], None], steps: int) -> float:
    """Return the share of its time that a learner spends in ``next``; a step without a batch precedes each step."""
    for _ in range(8):
        next(batches)
        work()
    asked = full = 0.0
    for _ in range(steps):
        work()
        start = time.perf_counter()
        next(batches)
        asked += time.perf_counter() - start
        work()  # waits for the copy too, since the batch was taken for this stream
        full += time.perf_counter() - start
    return asked / full


def _idle(batches: ReplayLoader, steps: int) -> float:
    """Return the share of its time that the GPU has no work, for a learner that waits for the step before the last."""
    launch = _products(STEP)

    def learn(get: Callable[[], object]) -> float:
        ends: list[torch.cuda.Event] = []
        start = time.perf_counter()
        for number in range(steps):
            get()
            launch()
            ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            ends[-1].record()
            if number:
                ends[-2].synchronize()
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(8):
        next(batches)
    bare, full = learn(lambda: None), learn(lambda: next(batches))
    return max(0.0, 1 - bare / full)


def _differing(buffer: TrajectoryReplayBuffer, workload: Workload, arguments: dict[str, Any]) -> Figure:
    """Return how many of ten batches are not those of the same draws on the CPU."""
    state = buffer.state_dict()
    with ReplayLoader(buffer, workload.batch, **arguments) as batches:
        there = [[tensor.to("cpu", copy=True) for tensor in tensors_of(next(batches))] for _ in range(10)]
    buffer.load_state_dict(state)
    with ReplayLoader(buffer, workload.batch) as batches:
        here = [list(tensors_of(next(batches))) for _ in range(10)]
    differing = sum(not all(map(torch.equal, mine, other)) for mine, other in zip(there, here, strict=True))
    name = f"batches that differ from those of a loader on the CPU, {workload.name}"
    return Figure("T10", name, float(differing), 0)


def _copies(batch: Any, name: str, options: Options, target: float | None) -> Iterator[Figure]:
    """Yield the rate at which a batch gets from pinned memory to the consumer over that of one plain pinned copy.

    The batch goes through a loader's memory, whose rows are there already; its copy is waited for.
    """
    memory = DeviceMemory(CudaDevice(DEVICE), 1)

    def ready() -> Ready:
        return memory.read(lambda out: batch if out is None else nest(out), len(batch["rewards"]))

    size = sum(tensor.nbytes for tensor in tensors_of(batch))
    plain, there = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8).cuda()
    theirs = _waited(lambda: there.copy_(plain, non_blocking=True))
    mine, peer = in_turn([_waited(lambda: ready().take()), theirs], 5 * options.repeats, calls=10)
    yield Figure(
        "T10",
        f"bytes/s of a batch to the device over one plain pinned copy, {name}",
        ratio(peer, mine),
        target,
        at_least=True,
        details={"mb": size / 1e6, "gb_per_s": size / mine.seconds / 1e9, "plain_gb_per_s": size / peer.seconds / 1e9},
    )
    several = [ready() for _ in range(100)]
    _wait()
    start = time.perf_counter()
    for one in several:
        one.take()
    each = (time.perf_counter() - start) / len(several)
    yield Figure("T10", f"a consumer's thread takes a batch that is there, {name}", each * 1e3, None, "ms")


# ---- the loss --------------------------------------------------------------------------------------


def loss(options: Options) -> Iterator[Figure]:
    """Yield T12 on the device: values, graph breaks, bandwidth, peak memory."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = options.count(ROWS, 4), LONG if CUDA else TOKENS // 4
    on_cpu = make_inputs("turns", rows, generator, tokens)
    yield from _values(on_cpu)
    batch = _moved(on_cpu, DEVICE, torch.float32)
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(ours)(batch).graph_break_count
    yield Figure("T12", "graph breaks of torch.compile", float(breaks), 0.0)
    variants: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {"eager": ours}
    if CUDA:
        variants["torch.compile"] = torch.compile(ours, fullgraph=True)
    yield from _speeds(batch, variants, options)
    if CUDA:
        peak = [_peak(batch, variant) for variant in (ours, transcription)]
        details = {"mb": peak[0] / 1e6}
        yield Figure("T12", "peak memory over the transcription's", peak[0] / peak[1], 0.5, details=details)


def _moved(batch: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return a copy of a batch; ``log_prob`` is a leaf that gets a gradient."""
    moved = Inputs(*(tensor.detach().to(device, dtype) for tensor in batch))
    return moved._replace(log_prob=moved.log_prob.requires_grad_())


def _values(on_cpu: Inputs) -> Iterator[Figure]:
    """Yield the relative error of loss and gradient against float64 on the CPU, from the same numbers."""
    for dtype, target in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        rounded = _moved(on_cpu, torch.device("cpu"), dtype)
        exact = _moved(rounded, torch.device("cpu"), torch.float64)
        device = _moved(rounded, DEVICE, dtype)
        step(ours, exact)
        step(ours, device)
        values = [float(ours(batch)["pg_loss"].detach()) for batch in (device, exact)]
        name = str(dtype).removeprefix("torch.")
        yield Figure("T12", f"loss, {name}: relative error", abs(values[0] - values[1]) / abs(values[1]), 1e-5)
        gradients = [_gradient(batch) for batch in (device, exact)]
        error = (gradients[0] - gradients[1]).norm() / gradients[1].norm()
        yield Figure("T12", f"gradient, {name}: relative error", float(error), target)


def _gradient(batch: Inputs) -> Tensor:
    if batch.log_prob.grad is None:
        raise RuntimeError("the loss left no gradient")
    return batch.log_prob.grad.double().cpu()


def _speeds(
    batch: Inputs, variants: dict[str, Callable[[Inputs], dict[str, Tensor]]], options: Options
) -> Iterator[Figure]:
    """Yield bytes that must be moved ÷ time, over the bandwidth of a plain copy on the device."""
    source = torch.empty_like(batch.log_prob.detach())
    big = torch.empty(1 << (28 if CUDA else 22), dtype=torch.float32, device=DEVICE)
    works = [_waited(partial(step, variant, batch)) for variant in variants.values()]
    graphed = list(variants) if CUDA else []
    works += [_graphed(batch, variants[name]) for name in graphed]
    works += [
        _waited(lambda: source.copy_(batch.advantages)),
        _waited(lambda: big[: len(big) // 2].copy_(big[len(big) // 2 :])),
    ]
    *times, small, large = in_turn(works, 3 * options.repeats, calls=5, warmup=4)
    copied = source.nbytes * 2 / small.seconds, big.nbytes / large.seconds
    for name, taken in zip([*variants, *(f"{name} in a CUDA graph" for name in graphed)], times, strict=True):
        moved = LOSS_STREAMS * source.nbytes / taken.seconds
        details = {"ms": taken.ms, "gb_per_s": moved / 1e9, "over_copy_of_one_tensor": moved / copied[0]}
        target, value = 0.8 if CUDA else None, moved / copied[1]
        yield Figure("T12", f"bandwidth over a plain copy's, {name}", value, target, at_least=True, details=details)


def _graphed(batch: Inputs, variant: Callable[[Inputs], dict[str, Tensor]]) -> Callable[[], None]:
    """Return the replay of a captured forward and backward pass: the time without launching kernels."""
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(variant, batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(variant, batch)
    return _waited(graph.replay)


def _peak(batch: Inputs, variant: Callable[[Inputs], dict[str, Tensor]]) -> int:
    """Return the most bytes allocated at one time during a step, above what was there before."""
    batch.log_prob.grad = None
    _wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(variant, batch)
    _wait()
    return torch.cuda.max_memory_allocated() - before


# ---- threads ---------------------------------------------------------------------------------------


def threads(options: Options) -> Iterator[Figure]:
    """Yield T1, T2, T5 and T6 at several numbers of torch threads, up to the number of cores."""
    for count in (count for count in THREADS if count <= (os.cpu_count() or 1)):
        folder = options.folder / f"{count}"
        with torch_threads(count):
            for benchmark in (t01_sample.cached, t01_sample.uncached, t05_growth.figures, t06_durable.figures):
                folder.mkdir()
                for figure in benchmark(replace(options, folder=folder)):
                    value = figure.details.get(f"ratio_torch_threads_{count}", figure.value)
                    yield replace(figure, name=f"{figure.name}, torch threads {count}", value=value)
                shutil.rmtree(folder)
