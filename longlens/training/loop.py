"""The training loop, from top to bottom.

The samples of a step follow from the seed and the step, its random numbers from the seed, the step and the process. So
a checkpoint says all with the step that it belongs to, and a run that was killed ends as if it had not been.
"""

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch

from longlens.data.datasets import Batch, Batches
from longlens.errors import Interrupted
from longlens.files import write_sealed
from longlens.models.model import Model, count_parameters, refuse_foresight
from longlens.training.config import Config, Runtime
from longlens.training.logs import Logs, open_logs
from longlens.training.machine import Processes, parallelize
from longlens.training.open_run import Learner, NotFinite, OpenRun, TrainState, count_losses, open_run
from longlens.training.run import higher_is_better
from longlens.training.step import (
    Evaluated,
    Schedule,
    check_finite,
    class_weights,
    evaluated_part,
    make_optimizer,
    prefetch,
    seed_step,
    set_learning_rate,
    train_step,
    training_set,
)

TICKS = 1_000_000  # into which a schedule cuts a budget of minutes


def train_run(config: Config, runtime: Runtime | None = None, fingerprint: str | None = None) -> dict[str, Any]:
    """Train, and return the result. A finished run gives its result at once, an unfinished one resumes. The fingerprint
    of the data is computed, unless someone has asked for it already."""
    runtime = runtime or Runtime()
    with open_run(config, runtime, fingerprint) as run:
        if run.result is not None:
            return run.result
        options, spec = config.training, config.task.spec
        plan = Plan(config, runtime)
        if options.batch_size > plan.samples:
            run.notify(f"a step has all {plan.samples:,} training samples, as batch_size is {options.batch_size:,}")
        learner = build_learner(run, plan)
        run.claim()  # what does not fit was refused before a file is written
        if run.result is not None:
            return run.result
        state, clock = run.resume(learner), learner.clock
        plan.spent = state.training_seconds
        losses, device = [], run.processes.device
        logged = run.folder.folder if run.processes.is_first else None
        opened = open_logs(logged, config, runtime, state.step, plan.steps or 0)
        explained = run.explain_divergence(lambda step: learner.schedule.factor(plan.place(step)))
        with explained, opened as logs, suspect_data(run, plan):
            if plan.evaluates(state):  # it was stopped in the midst of an evaluation
                validate(run, learner, logs)
            clock.count(training=False)  # opening the logs, and perhaps an evaluation
            for batch in prefetch(load_batches(config, plan, state, run.processes), device):
                seed_step(options.seed, state.step, run.processes)
                factor = learner.schedule.factor(plan.place(state.step))
                set_learning_rate(learner.optimizer, factor)
                how = batch, options, run.processes, learner.class_weights
                with clock.computing():
                    loss = train_step(learner.parallel, spec, learner.optimizer, *how)
                state.step += 1
                losses.append((loss, batch.tokens))

                clock.count(training=True)
                stops = False
                if plan.looks(state) or device.type == "cpu":
                    stops, plan.spent = count_losses(losses, state, run.processes, run.stop.asked)
                with clock.not_training():
                    if plan.logs(state):
                        rate, lr = clock.tokens_per_second(), factor * options.lr
                        logs.trained(state.step, loss=state.take_mean_loss(), lr=lr, tokens_per_second=rate)
                    if plan.evaluates(state) and not stops:
                        validate(run, learner, logs)
                    elif plan.saves(state) or stops:
                        run.save(learner, logs)
                if stops:
                    raise Interrupted(f"stopped at step {state.step:,}{plan.of_steps}, and saved")
                if plan.left(state) == 0:
                    break
            return finish(run, learner, plan)


class Plan:
    """What is due at which step."""

    def __init__(self, config: Config, runtime: Runtime):
        options = config.training
        self.runtime = runtime
        self.samples = len(training_set(config.task, options))
        self.per_epoch = math.ceil(self.samples / options.batch_size)
        self.steps = options.total_steps(self.samples)  # None if the clock ends the run
        self.seconds = 60 * (options.minutes or 0)
        self.spent = 0.0  # of these seconds, as all processes count them
        self.stop_after = options.stop_after
        self.evaluate_every = options.evaluate_every or self.per_epoch
        if options.epochs is not None:
            passes = math.ceil(options.epochs * self.per_epoch)
            if options.evaluate_every is None and passes < options.min_steps:
                self.evaluate_every = math.ceil(options.min_steps / math.ceil(options.epochs))

    @property
    def of_steps(self) -> str:
        return "" if self.steps is None else f" of {self.steps:,}"

    @property
    def length(self) -> int:
        """The length of the schedule: the steps of the run, or ticks of the clock if that ends it."""
        return self.steps or TICKS

    def place(self, step: int) -> int:
        """In the schedule, after so many steps: the clock decides if the budget is one of minutes."""
        return step if self.steps is not None else round(min(1, self.spent / self.seconds) * TICKS)

    def is_last(self, state: TrainState) -> bool:
        return self.spent >= self.seconds if self.steps is None else state.step >= self.steps

    def ends_early(self, state: TrainState) -> bool:
        """Whether the last evaluations, the one at this step among them, were not better than one before."""
        if self.stop_after is None or state.best_step is None or state.evaluated < state.step or self.is_last(state):
            return False
        return state.step - state.best_step >= self.stop_after * self.evaluate_every

    def left(self, state: TrainState) -> int:
        """Steps; a clock may end them sooner."""
        if self.ends_early(state) or self.is_last(state):
            return 0
        return sys.maxsize if self.steps is None else self.steps - state.step

    def logs(self, state: TrainState) -> bool:
        return state.step % self.runtime.log_every == 0 or self.is_last(state)

    def saves(self, state: TrainState) -> bool:
        return state.step % self.runtime.checkpoint_every == 0

    def evaluates(self, state: TrainState) -> bool:
        at_interval = state.step % self.evaluate_every == 0 or self.is_last(state)
        return at_interval and state.evaluated < state.step

    def looks(self, state: TrainState) -> bool:
        """At the losses, for which a GPU has to be waited for."""
        return self.logs(state) or self.saves(state) or self.evaluates(state)


def build_learner(run: OpenRun, plan: Plan) -> Learner:
    config, processes = run.config, run.processes
    torch.manual_seed(config.training.seed)
    model = Model(config.task.spec, config.mixer, config.model).to(processes.device)
    refuse_foresight(model)
    parameters = count_parameters(model)
    if run.runtime.compile:
        run.notify("compiling the model: the first steps, and the first of each new length, can take a minute")
        model.compile()
    parallel = parallelize(model, processes, run.runtime.parallel)
    optimizer = make_optimizer(model, config.training)
    schedule = Schedule(config.training, plan.length, higher_is_better(config.task.spec.metric))
    weights = class_weights(config.task, config.training)
    weights = None if weights is None else weights.float().to(processes.device)
    return Learner(model, parallel, optimizer, schedule, parameters, weights)


def load_batches(config: Config, plan: Plan, state: TrainState, processes: Processes) -> Iterator[Batch]:
    """One for each step that is left."""
    options, left = config.training, plan.left(state)
    epoch, start = divmod(state.step, plan.per_epoch)
    while left > 0:
        batches = Batches(
            training_set(config.task, options, epoch),
            options.batch_size,
            epoch=epoch,
            start=start,
            seed=options.seed,
            shuffle=True,
            group_by_length=options.group_by_length,
            rank=processes.rank,
            world_size=processes.count,
        )
        yield from islice(batches, left)
        left -= len(batches)
        epoch, start = epoch + 1, 0


@contextmanager
def suspect_data(run: OpenRun, plan: Plan) -> Iterator[None]:
    """Look at the samples of a step that ends in a number that is not finite, before the learning rate is blamed."""
    try:
        yield
    except NotFinite as problem:
        before, alone = TrainState(step=problem.step - 1), replace(run.processes, rank=0, count=1)
        batch = islice(load_batches(run.config, plan, before, alone), 1)
        check_finite(batch, f"step {problem.step:,} of training on {run.config.task.title}")
        raise


def validate(run: OpenRun, learner: Learner, logs: Logs) -> None:
    """Evaluate on the validation set; then save. An evaluation that is stopped is made when the run resumes."""
    task, options, state = run.config.task, run.config.training, learner.state
    try:
        value, loss, _ = run.evaluate(learner.model, "valid")
    except Interrupted:
        run.save(learner, logs)
        raise
    if not math.isfinite(loss):
        evaluated = evaluated_part(task.split("valid"), options.valid_samples)
        check_finite(Batches(evaluated, options.batch_size), f"the validation set of {task.title}")
        raise NotFinite(f"the loss on validation is {loss}", state.step)
    merit = -loss if math.isnan(value) else value  # equal labels have no R², which would fall as the loss rises
    state.score(value, merit, higher_is_better(task.spec.metric))
    learner.schedule.update(merit)
    logs.evaluated(state.step, loss=loss, **{task.spec.metric: value})
    run.save(learner, logs)


def finish(run: OpenRun, learner: Learner, plan: Plan) -> dict[str, Any]:
    """Test the last model and the best on validation, once; write the result."""
    task, options, state = run.config.task, run.config.training, learner.state
    last = run.evaluate(learner.model, "test")
    best: Evaluated | None = None
    if state.best_step == state.step:
        best = last
    elif run.restore_best(learner):
        best = run.evaluate(learner.model, "test")
    run.measure(learner)
    overhead = 1 - state.computing_seconds / max(state.training_seconds, 1e-9)
    result = {
        "task": task.title,
        "mixer": run.config.mixer.name,
        "seed": options.seed,
        "metric": task.spec.metric,
        "test": best and best.metric,  # of the best model on the validation set
        "test_last": last.metric,
        "test_samples": min(options.test_samples or math.inf, len(task.split("test"))),
        "valid": math.nan if state.last is not None and math.isnan(state.last) else state.best,
        "valid_last": state.last,
        "best_step": state.best_step,
        "steps": state.step,
        "ended_by": "validation" if plan.ends_early(state) else "steps" if plan.steps else "minutes",
        "parameters": learner.parameters,
        "tokens": state.tokens,
        "tokens_per_second": state.tokens / max(state.training_seconds, 1e-9),
        "overhead": overhead if run.processes.device.type == "cpu" else None,  # a GPU is not waited for
        "seconds": state.seconds,
        "peak_memory_bytes": state.peak_memory,
    }
    if best is not None:
        run.processes.on_first(run.folder.write_scores, best.scores)
    run.processes.on_first(write_sealed, run.folder.folder / "result.json", result)
    return result
