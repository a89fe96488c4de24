"""Check and measure trajstore on a GPU:  ``python -m tools.gpu_check [--json FILE] [--scale 1.0] [SECTION ...]``.

Takes at most six minutes. Needs torch, numba, orjson, fsspec and msgspec; the section ``trainer`` needs transformers
too. Without a CUDA device the same code runs on the CPU, with smaller inputs, and the report says so. A section that
fails is reported by name and the others run; the exit code is then 1. A missed target is no failure.

``--table FILE`` prints the rows of the page ``docs/benchmarks.md`` from a report.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tools.bench import t01_sample, t05_growth, t06_durable
from tools.bench.report import Figure, Options, needs, table
from tools.bench.t12_loss import TOKENS, Inputs, make_inputs, ours, step, transcription
from tools.bench.timing import in_turn, ratio, seconds, torch_threads
from tools.bench.workloads import Workload, filled, image, state
from trajstore import TrajectoryReplayBuffer
from trajstore._core.feeding.device import CudaDevice
from trajstore._core.feeding.memory import tensors_of
from trajstore.loader import ReplayLoader

STEP = 0.005
"""Seconds of a learner's step."""
ROWS, LONG = 64, 8192
THREADS = (1, 4, 16)
LOSS_STREAMS = 12
"""Tensors [B, R] that the loss must move: it reads log_prob, old_log_prob, advantages and both masks; writes four
results with a value per token, and the derivative; the backward pass reads the derivative and writes the gradient."""


class Place:
    """The device of a check: a CUDA device, or the CPU."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.name = torch.cuda.get_device_name() if self.cuda else "CPU (no CUDA device)"

    def wait(self) -> None:
        """Wait until the device has finished."""
        if self.cuda:
            torch.cuda.synchronize()

    def waited(self, work: Callable[[], object]) -> Callable[[], None]:
        """Return a function that does some work and waits until the device has finished it."""

        def done() -> None:
            work()
            self.wait()

        return done


# ---- the loader ------------------------------------------------------------------------------------


def loader(place: Place, options: Options) -> Iterator[Figure]:
    """Yield T10 with steps of 5 ms, and the rate of the copy to the device."""
    workload = image(options)
    steps = options.count(600, 5)
    work = _step_of(place, STEP)
    with filled(options.folder / "image", workload.trajectories, seed=0) as buffer:
        arguments: dict[str, Any] = {"device": "cuda"} if place.cuda else {"reuse": True}
        with ReplayLoader(buffer, workload.batch, **arguments) as batches:
            asked, bare, full = _waits(place, batches, work, steps)
        yield Figure("T10", "learner waits in next(), steps of 5 ms", asked / full, 0.02, details={"steps": steps})
        yield Figure(
            "loader",
            "batches that differ from those of a loader on the CPU",
            _differing(buffer, workload, arguments),
            0,
        )
        yield Figure("T10", "step with the loader over a step without one", full / bare, None)
        with ReplayLoader(buffer, workload.batch, columns=["rewards"], **arguments) as batches:
            next(batches)  # the transitions of a narrow batch: what a wait costs that is not the copy
            narrow, _, full = _waits(place, batches, work, steps)
        yield Figure("T10", "the same, rewards only", narrow / full, 0.02)
        if place.cuda:
            with ReplayLoader(buffer, workload.batch, **arguments) as batches:
                share = _idle(batches, steps)
            yield Figure("T10", "GPU without work, steps of 5 ms launched one ahead", share, 0.02)
            yield from _copies(place, buffer.sample(workload.batch), "image", options, 0.9)
    if place.cuda:
        with filled(options.folder / "state", state(options).trajectories, seed=0) as buffer:
            yield from _copies(place, buffer.sample(1024), "state", options, None)


def _step_of(place: Place, length: float) -> Callable[[], None]:
    """Return a step that takes about ``length`` seconds: matrix products on a GPU, sleep without one."""
    if not place.cuda:
        return partial(time.sleep, length)
    matrix = torch.randn(2048, 2048, device=place.device)
    count = _products(matrix, length)

    def work() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()

    return work


def _waits(place: Place, batches: ReplayLoader, work: Callable[[], None], steps: int) -> tuple[float, float, float]:
    """Return the seconds spent in ``next``, those of the steps without a loader, and those with it, in turn."""
    for _ in range(8):
        next(batches)
        work()
    asked = bare = full = 0.0
    for _ in range(steps):
        bare += seconds(work)
        start = time.perf_counter()
        next(batches)
        asked += time.perf_counter() - start
        work()  # waits for the copy too, since the batch was taken for this stream
        full += time.perf_counter() - start
    return asked, bare, full


def _idle(batches: ReplayLoader, steps: int) -> float:
    """Return the share of its time that the GPU has no work, for a learner that waits for the step before the last."""
    matrix = torch.randn(2048, 2048, device="cuda")
    products = _products(matrix, STEP)

    def learn(get: Callable[[], object]) -> float:
        ends: list[torch.cuda.Event] = []
        start = time.perf_counter()
        for number in range(steps):
            get()
            for _ in range(products):
                torch.mm(matrix, matrix)
            ends.append(torch.cuda.Event())  # type: ignore[no-untyped-call]
            ends[-1].record()  # type: ignore[no-untyped-call]
            if number:
                ends[-2].synchronize()  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        return time.perf_counter() - start

    for _ in range(8):
        next(batches)
    bare, full = learn(lambda: None), learn(lambda: next(batches))
    return max(0.0, 1 - bare / full)


def _products(matrix: Tensor, length: float) -> int:
    """Return how many products of a matrix with itself take about ``length`` seconds on its device."""

    def many() -> None:
        for _ in range(100):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize()

    many()
    return max(1, round(length * 100 / min(seconds(many) for _ in range(3))))


def _differing(buffer: TrajectoryReplayBuffer, workload: Workload, arguments: dict[str, Any]) -> float:
    """Return how many of ten batches are not those of the same draws on the CPU."""
    state = buffer.state_dict()
    with ReplayLoader(buffer, workload.batch, **arguments) as batches:
        there = [[tensor.to("cpu", copy=True) for tensor in tensors_of(next(batches))] for _ in range(10)]
    buffer.load_state_dict(state)
    with ReplayLoader(buffer, workload.batch) as batches:
        here = [list(tensors_of(next(batches))) for _ in range(10)]
    return float(sum(not all(map(torch.equal, mine, other)) for mine, other in zip(there, here, strict=True)))


def _copies(place: Place, batch: Any, name: str, options: Options, target: float | None) -> Iterator[Figure]:
    """Yield the rate at which a batch reaches the device over that of one plain copy of as many pinned bytes."""
    device = CudaDevice(place.device)
    tensors = [device.pin(tensor) for tensor in tensors_of(batch)]
    size = sum(tensor.nbytes for tensor in tensors)
    plain, there = torch.empty(size, dtype=torch.uint8).pin_memory(), torch.empty(size, dtype=torch.uint8).cuda()

    def send() -> None:
        device.send(tensors)[1].wait()

    theirs = place.waited(lambda: there.copy_(plain, non_blocking=True))
    mine, peer = in_turn([send, theirs], 5 * options.repeats, calls=10)
    yield Figure(
        "H2D",
        f"bytes/s of a batch to the device over one plain pinned copy, {name}",
        ratio(peer, mine),
        target,
        at_least=True,
        details={"mb": size / 1e6, "gb_per_s": size / mine.seconds / 1e9, "plain_gb_per_s": size / peer.seconds / 1e9},
    )


# ---- the loss --------------------------------------------------------------------------------------


def loss(place: Place, options: Options) -> Iterator[Figure]:
    """Yield T12 on the device: values, graph breaks, bandwidth, peak memory."""
    generator = torch.Generator().manual_seed(0)
    rows, tokens = options.count(ROWS, 4), LONG if place.cuda else TOKENS // 4
    on_cpu = make_inputs("turns", rows, generator, tokens)
    yield from _values(place, on_cpu)
    batch = _moved(on_cpu, place.device, torch.float32)
    torch._dynamo.reset()
    breaks = torch._dynamo.explain(ours)(batch).graph_break_count
    yield Figure("T12", "graph breaks of torch.compile", float(breaks), 0.0)
    variants: dict[str, Callable[[Inputs], dict[str, Tensor]]] = {"eager": ours, "transcription": transcription}
    if place.cuda:
        variants["torch.compile"] = torch.compile(ours, fullgraph=True)
    yield from _speeds(place, batch, variants, options)
    if place.cuda:
        peak = [_peak(place, batch, variant) for variant in (ours, transcription)]
        yield Figure(
            "T12", "peak memory over the transcription's", peak[0] / peak[1], 0.5, details={"mb": peak[0] / 1e6}
        )


def _moved(batch: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Return a copy of a batch; ``log_prob`` is a leaf that gets a gradient."""
    moved = Inputs(*(tensor.detach().to(device, dtype) for tensor in batch))
    return moved._replace(log_prob=moved.log_prob.requires_grad_())


def _values(place: Place, on_cpu: Inputs) -> Iterator[Figure]:
    """Yield the relative error of loss and gradient against float64 on the CPU, from the same numbers."""
    for dtype, target in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):
        rounded = _moved(on_cpu, torch.device("cpu"), dtype)
        exact = _moved(rounded, torch.device("cpu"), torch.float64)
        device = _moved(rounded, place.device, dtype)
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
    place: Place, batch: Inputs, variants: dict[str, Callable[[Inputs], dict[str, Tensor]]], options: Options
) -> Iterator[Figure]:
    """Yield bytes that must be moved ÷ time, over the bandwidth of a plain copy on the device."""
    source = torch.empty_like(batch.log_prob.detach())
    big = torch.empty(1 << (28 if place.cuda else 22), dtype=torch.float32, device=place.device)
    works = [place.waited(partial(step, variant, batch)) for variant in variants.values()]
    graphed = [name for name in variants if place.cuda and name != "transcription"]
    works += [_graphed(place, batch, variants[name]) for name in graphed]
    works += [
        place.waited(lambda: source.copy_(batch.advantages)),
        place.waited(lambda: big[: len(big) // 2].copy_(big[len(big) // 2 :])),
    ]
    *times, small, large = in_turn(works, 3 * options.repeats, calls=5, warmup=4)
    copied = source.nbytes * 2 / small.seconds, big.nbytes / large.seconds
    for name, taken in zip([*variants, *(f"{name} in a CUDA graph" for name in graphed)], times, strict=True):
        moved = LOSS_STREAMS * source.nbytes / taken.seconds
        details = {"ms": taken.ms, "gb_per_s": moved / 1e9, "over_copy_of_one_tensor": moved / copied[0]}
        target = 0.8 if name != "transcription" and place.cuda else None
        yield Figure(
            "T12", f"bandwidth over a plain copy's, {name}", moved / copied[1], target, at_least=True, details=details
        )


def _graphed(place: Place, batch: Inputs, variant: Callable[[Inputs], dict[str, Tensor]]) -> Callable[[], None]:
    """Return the replay of a captured forward and backward pass: the time without launching kernels."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(variant, batch)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(variant, batch)
    return place.waited(graph.replay)


def _peak(place: Place, batch: Inputs, variant: Callable[[Inputs], dict[str, Tensor]]) -> int:
    """Return the most bytes allocated at one time during a step, above what was there before."""
    batch.log_prob.grad = None
    place.wait()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(variant, batch)
    place.wait()
    return torch.cuda.max_memory_allocated() - before


# ---- the trainer -----------------------------------------------------------------------------------


def trainer(place: Place, options: Options) -> Iterator[Figure]:
    """Yield whether two runs of the reference trainer with replay, on the device, make the same draws."""
    needs("transformers", extra="demo")
    steps = options.count(50, 2)
    runs = [_trained(place, steps, options.folder / name) for name in ("first", "second")]
    first, second = runs
    differ = sum(mine != other for mine, other in zip(first["draws"], second["draws"], strict=True))
    yield Figure(
        "trainer",
        f"steps of {steps} whose replayed rollouts differ between two runs",
        float(differ),
        0.0,
        details={
            "replayed": sum(map(len, first["draws"])),
            "seconds": first["seconds"],
            "rewards_equal": first["rewards"] == second["rewards"],
        },
    )


def _trained(place: Place, steps: int, folder: Path) -> dict[str, Any]:
    from examples.grpo.config import TrainerConfig
    from examples.grpo.trainer import ReferenceTrainer
    from trainer_hooks.config import ExperienceReplayConfig

    replay = ExperienceReplayConfig(enable=True, store={"path": str(folder)})
    config = TrainerConfig(
        environment="sort",
        steps=steps,
        device=place.device.type,
        evaluate_every=steps + 1,
        replay=replay,
    )
    draws: list[list[str]] = []
    with ReferenceTrainer(config) as run:
        plan_of = run.hook.before_rollout

        def noted(*arguments: Any) -> Any:
            plan = plan_of(*arguments)
            draws.append([str(history.rollout_id) for task in plan for history in task.histories])
            return plan

        run.hook.before_rollout = noted
        run.warm_start()
        start = time.perf_counter()
        curve = run.train()
    return {"draws": draws, "rewards": [point.reward for point in curve], "seconds": time.perf_counter() - start}


# ---- threads ---------------------------------------------------------------------------------------


def threads(place: Place, options: Options) -> Iterator[Figure]:
    """Yield T1, T2, T5 and T6 at several numbers of torch threads, up to the number of cores."""
    cores = os.cpu_count() or 1
    for count in [count for count in THREADS if count <= cores]:
        with torch_threads(count):
            for name, figures in (("t1", t01_sample.cached), ("t2", partial(t01_sample.uncached, kinds=("pt",)))):
                for figure in figures(_inside(options, f"{name}_{count}")):
                    value = figure.details[f"ratio_torch_threads_{count}"]
                    details = {"raw_ms": figure.details[f"raw_ms_{count}"]}
                    name_of_it = f"{figure.name}, torch threads {count}"
                    yield Figure(figure.id, name_of_it, value, figure.target, details=details)
            for name, figures in (("t5", t05_growth.figures), ("t6", t06_durable.figures)):
                for figure in figures(_inside(options, f"{name}_{count}")):
                    yield Figure(
                        figure.id,
                        f"{figure.name}, torch threads {count}",
                        figure.value,
                        figure.target,
                        figure.unit,
                        figure.at_least,
                        figure.details,
                    )


def _inside(options: Options, name: str) -> Options:
    folder = options.folder / name
    folder.mkdir()
    return Options(folder, options.repeats, options.scale)


SECTIONS: dict[str, Callable[[Place, Options], Iterator[Figure]]] = {
    "loader": loader,
    "loss": loss,
    "trainer": trainer,
    "threads": threads,
}


def check(names: Sequence[str], options: Options) -> tuple[dict[str, Any], list[Figure]]:
    """Run sections; return the report, and its figures."""
    place = Place()
    report: dict[str, Any] = {
        "device": place.name,
        "cuda": place.cuda,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "figures": [],
        "failed": {},
        "seconds": {},
    }
    figures: list[Figure] = []
    for name in names:
        start = time.perf_counter()
        try:
            for figure in SECTIONS[name](place, _inside(options, name)):
                figures.append(figure)
                report["figures"].append(json.loads(figure.line()))
                sys.stdout.write(figure.line() + "\n")
                sys.stdout.flush()
        except Exception:  # whatever fails here is reported by name, and the next section runs
            report["failed"][name] = traceback.format_exc()
            sys.stdout.write(f"{name} failed:\n{report['failed'][name]}\n")
        report["seconds"][name] = round(time.perf_counter() - start, 1)
    return report, figures


def rows(report: dict[str, Any]) -> str:
    """Return the table of the docs from a report."""
    lines = ["| id | measured | figure | target | met |", "| --- | --- | --- | --- | --- |"]
    words = {True: "yes", False: "no", None: ""}
    for figure in report["figures"]:
        value = figure.get("ratio", figure.get("value"))
        target = "" if figure["target"] is None else f"{figure['target']:g}"
        lines.append(f"| {figure['id']} | {figure['name']} | {value:.3g} | {target} | {words[figure['ok']]} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line names; return 1 if a section failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION", help=f"which (all): {' '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to this file")
    parser.add_argument(
        "--table", type=Path, metavar="FILE", help="print the rows of the docs from a report, and run nothing"
    )
    parser.add_argument("--repeats", type=int, default=3, help="how often each thing is timed (3)")
    parser.add_argument("--scale", type=float, default=1.0, help="size of the workloads (1)")
    chosen = parser.parse_args(arguments)
    if chosen.table is not None:
        sys.stdout.write(rows(json.loads(chosen.table.read_text())) + "\n")
        return 0
    names = chosen.sections or list(SECTIONS)
    if unknown := [name for name in names if name not in SECTIONS]:
        parser.error(f"no section {', '.join(unknown)}; there are {' '.join(SECTIONS)}")
    with tempfile.TemporaryDirectory(prefix="trajstore_gpu_") as folder:
        report, figures = check(names, Options(Path(folder), chosen.repeats, chosen.scale))
    if chosen.json is not None:
        chosen.json.write_text(json.dumps(report, indent=1) + "\n")
    sys.stdout.write(f"\non {report['device']}, torch {report['torch']}, {report['cores']} cores\n{table(figures)}\n")
    return 1 if report["failed"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
