"""The training loop: steps, logs, checkpoints, and where a killed run goes on.

What a step does is in `step.py`. The loop only feeds batches and writes down what came out, so a
resumed run repeats nothing and skips nothing: state and data position are saved together.
"""

import dataclasses
import itertools
import json
import pathlib
import time
from typing import Any, Callable, Iterator, Mapping, Protocol, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import tensorboardX
import tqdm

from dspark_jax.target.config import TransformerConfig
from dspark_jax.training import curves
from dspark_jax.training import losses
from dspark_jax.training import step as step_lib
from dspark_jax.training.config import DTYPES, TrainConfig

METRICS_FILE = "metrics.jsonl"
FIRST_KEYS = ("input_ids", "loss_mask")


class DataIterator(Protocol):
  """Batches {input_ids int32 [B, T], loss_mask [B, T], ...} with a position that can be saved."""

  def __next__(self) -> Mapping[str, np.ndarray]: ...
  def get_state(self) -> Mapping[str, Any]: ...
  def set_state(self, state: Mapping[str, Any]) -> None: ...


class Saver(Protocol):
  """Where checkpoints go; `dspark_jax.checkpoints.Checkpointer` is one."""

  def latest_step(self) -> int | None: ...
  def save(self, step: int, state: Any, *, data_state: Mapping[str, Any]) -> None: ...
  def restore(self, template: Any) -> tuple[Any, Mapping[str, Any]]: ...


@dataclasses.dataclass(frozen=True)
class TrainResult:
  """What a run leaves: the drafter's parameters, steps done, last metrics, whether it is done."""
  params: Any
  num_steps: int
  metrics: Mapping[str, float]
  is_finished: bool


def train(config: TrainConfig, *, target_config: TransformerConfig, drafter_config: Any,
          frozen: step_lib.Frozen, params: Any, batches: DataIterator, checkpointer: Saver,
          workdir: str | pathlib.Path, eval_batches: Sequence[Mapping[str, np.ndarray]] = (),
          on_step: Callable[[int], None] | None = None) -> TrainResult:
  """Trains `params` until max_steps, max_minutes or the end of the data; resumes if it can.

  Args:
    drafter_config: of any kind (`drafter.kinds`).
    frozen: target parameters and the reduced draft vocabulary.
    params: the drafter's at step 0; only their shapes matter when a checkpoint exists.
    batches: iterator of micro-batches.
    checkpointer: of this run.
    workdir: gets TensorBoard events, metrics.jsonl and the curves as PNG.
    eval_batches: held-out micro-batches for `eval_every`, with anchors that never change.
    on_step: called with the number of finished steps after each (for tests and progress).
  """
  objective = make_objective(config, target_config, drafter_config)
  frozen = frozen.cast_layers(objective.target_dtype)
  state = step_lib.init_state(params, jax.random.key(config.seed), optimizer=config.optimizer)
  if checkpointer.latest_step() is not None:
    state, data_state = checkpointer.restore(state)
    batches.set_state(data_state)
  start_step = int(state.step)
  max_steps = config.optimizer.max_steps
  log = MetricsLog(pathlib.Path(workdir), start_step)
  deadline = time.monotonic() + 60 * config.max_minutes if config.max_minutes else float("inf")
  metrics: dict[str, float] = {}
  num_done, saved = start_step, start_step
  bar = tqdm.tqdm(total=max_steps, initial=start_step, desc="train", unit="step")
  started = time.monotonic()
  tokens = 0
  while num_done < max_steps and time.monotonic() < deadline:
    group = next_group(batches, config.accumulation)
    if group is None:
      break
    state, device_metrics = step_lib.jit_train_step(
        state, frozen, group, objective=objective, optimizer=config.optimizer)
    num_done += 1
    tokens += group["input_ids"].size
    bar.update()
    if num_done % config.log_every == 0 or num_done == max_steps:
      metrics = {k: float(v) for k, v in device_metrics.items()}  # waits for the device
      metrics["tokens_per_s"] = tokens / (time.monotonic() - started)
      started, tokens = time.monotonic(), 0
      log.write(num_done, "train", metrics)
      bar.set_postfix(tau_prob=f"{metrics['tau_prob']:.3f}", loss=f"{metrics['loss']:.4f}",
                      tok_s=f"{metrics['tokens_per_s']:.0f}")
    if config.eval_every and eval_batches and num_done % config.eval_every == 0:
      log.write(num_done, "eval", evaluate(state.params, frozen, eval_batches,
                                           objective=objective))
      started, tokens = time.monotonic(), 0
    if config.checkpoint_every and num_done % config.checkpoint_every == 0:
      checkpointer.save(num_done, state, data_state=batches.get_state())
      saved = num_done
    if on_step is not None:
      on_step(num_done)
  bar.close()
  if saved != num_done:
    checkpointer.save(num_done, state, data_state=batches.get_state())
  if eval_batches:
    final = evaluate(state.params, frozen, eval_batches, objective=objective)
    log.write(num_done, "eval", final)
    metrics.update({f"eval_{k}": v for k, v in final.items()})
  log.close()
  curves.plot(pathlib.Path(workdir) / METRICS_FILE, pathlib.Path(workdir))
  return TrainResult(params=state.params, num_steps=num_done, metrics=metrics,
                     is_finished=num_done >= max_steps)


def make_objective(config: TrainConfig, target_config: TransformerConfig,
                   drafter_config: Any) -> step_lib.Objective:
  """Returns the static part of the loss."""
  return step_lib.Objective(
      target_config=target_config, drafter_config=drafter_config, loss=config.loss,
      num_anchors=config.num_anchors, dtype=DTYPES[config.dtype],
      target_dtype=DTYPES[config.target_dtype])


def next_group(batches: Iterator[Mapping[str, np.ndarray]], size: int):
  """Stacks the next `size` micro-batches to [K, B, T]; None at the end of the data.

  A last group that is short is filled with micro-batches of loss mask 0, which carry no weight:
  the step is that of the micro-batches it has, and its shape compiles once.
  """
  group = list(itertools.islice(batches, size))
  if not group:
    return None
  empty = {k: np.zeros_like(group[0][k]) for k in FIRST_KEYS}
  group += [empty] * (size - len(group))
  return {k: jnp.asarray(np.stack([g[k] for g in group]), jnp.int32) for k in FIRST_KEYS}


def evaluate(params: Any, frozen: step_lib.Frozen, batches, *,
             objective: step_lib.Objective) -> dict[str, float]:
  """Returns the metrics of held-out micro-batches, anchors fixed by their order."""
  loss, sums = 0.0, None
  for i, batch in enumerate(batches):
    arrays = {k: jnp.asarray(batch[k], jnp.int32) for k in FIRST_KEYS}
    more_loss, more = _jit_sums(params, frozen, arrays, jax.random.fold_in(jax.random.key(0), i),
                                objective=objective)
    loss, sums = loss + more_loss, more if sums is None else jax.tree.map(jnp.add, sums, more)
  return {k: float(v) for k, v in losses.summarize(loss, sums).items()}


_jit_sums = jax.jit(step_lib.sum_batch_losses, static_argnames=("objective",))


class MetricsLog:
  """TensorBoard events and a JSONL file; the file forgets steps that a resumed run repeats."""

  def __init__(self, workdir: pathlib.Path, start_step: int):
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / METRICS_FILE
    kept = []
    if path.is_file():
      for line in path.read_text().splitlines():
        try:
          if json.loads(line)["step"] <= start_step:
            kept.append(line)
        except json.JSONDecodeError:  # a line cut by a kill
          continue
    path.write_text("".join(line + "\n" for line in kept))
    self._file = path.open("a")
    self._board = tensorboardX.SummaryWriter(str(workdir / "tensorboard"), purge_step=start_step)

  def write(self, step: int, split: str, metrics: Mapping[str, float]) -> None:
    self._file.write(json.dumps({"step": step, "split": split, **metrics}) + "\n")
    self._file.flush()
    for name, value in metrics.items():
      self._board.add_scalar(f"{split}/{name}", value, step)

  def close(self) -> None:
    self._file.close()
    self._board.close()
