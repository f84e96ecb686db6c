"""Training batches in a seeded, resumable order, by grain."""

import dataclasses
import hashlib

import numpy as np


@dataclasses.dataclass(frozen=True)
class PipelineConfig:
  """What fixes the batches and their order, together with the rows.

  Attributes:
    batch_size: sequences a batch; the last incomplete batch of the last epoch is left out.
    max_len: tokens a sequence; longer rows lose their end, shorter ones are padded on the right.
    seed: of the order, which is another one in every epoch.
    pad_id: token id of the padding; the loss mask is False there.
    num_epochs: passes over the rows, None without end. Batches run across epochs.
    is_shuffled: False keeps the rows in their given order.
  """
  batch_size: int
  max_len: int
  seed: int = 0
  pad_id: int = 0
  num_epochs: int | None = None
  is_shuffled: bool = True

  def __post_init__(self):
    bounds = {"batch_size": 1, "max_len": 2, "seed": 0, "pad_id": 0, "num_epochs": 1}
    for name, low in bounds.items():
      value = getattr(self, name)
      if name == "num_epochs" and value is None:
        continue
      if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise ValueError(f"{name}: found {value!r}, expected an integer >= {low}")
    if self.seed >= 2 ** 32:
      raise ValueError(f"seed: found {self.seed}, expected at most {2 ** 32 - 1}")


def has_anchor(loss_mask_T):
  """Whether a row has an anchor candidate: a position in the loss whose next one is too."""
  loss_mask_T = np.asarray(loss_mask_T, dtype=bool)
  return bool(np.any(loss_mask_T[:-1] & loss_mask_T[1:]))


class Batches:
  """Iterator over batches {"input_ids", "loss_mask", "lengths"}: int32, bool [B, T]; int32 [B].

  Rows come as `jsonl.read_rows` returns them. A row without an anchor candidate, counted after the
  cut to `max_len`, cannot train anything and is skipped.

  Attributes:
    num_rows, num_skipped, num_truncated: rows kept, rows skipped, kept rows that lost their end.
    num_batches: batches in all, None if they never end.
  """

  def __init__(self, rows, *, config):
    self.config = config
    self._rows, self.num_skipped, self.num_truncated = [], 0, 0
    for row in rows:
      self._keep_or_skip(row)
    self.num_rows = len(self._rows)
    if not self._rows:
      raise ValueError(f"rows: none of {self.num_skipped} has an anchor candidate (two tokens of "
                       f"the loss in a row) within max_len {config.max_len}")
    self._fingerprint = _hash_rows(self._rows)
    self.num_batches = None
    if config.num_epochs is not None:
      self.num_batches = self.num_rows * config.num_epochs // config.batch_size
      if not self.num_batches:
        raise ValueError(f"batch_size: found {config.batch_size}, expected at most "
                         f"{self.num_rows * config.num_epochs}: {self.num_rows} rows with an "
                         f"anchor candidate, {config.num_epochs} epochs")
    self._iterator = self._make_iterator()

  def __iter__(self):
    return self

  def __next__(self):
    return next(self._iterator)

  def get_state(self):
    """The place in the order, as a JSON-able dict that also names the data and the settings."""
    return {"place": self._iterator.get_state(), "rows": self._fingerprint,
            "config": dataclasses.asdict(self.config)}

  def set_state(self, state):
    """Goes to the place of `get_state`: the next batches are bit for bit those that followed it.

    Raises ValueError, and changes nothing, if the state belongs to other rows or settings.
    """
    missing = {"place", "rows", "config"} - set(state)
    if missing:
      raise ValueError(f"pipeline state: found no {sorted(missing)}")
    for name, ours in dataclasses.asdict(self.config).items():
      if state["config"].get(name) != ours:
        raise ValueError(f"pipeline state: {name}: found {state['config'].get(name)!r}, expected "
                         f"{ours!r} as configured now")
    if state["rows"] != self._fingerprint:
      raise ValueError(f"pipeline state: rows: found data {state['rows']}, expected "
                       f"{self._fingerprint}: the training rows have changed")
    self._iterator.set_state(state["place"])

  def _keep_or_skip(self, row):
    ids_T = np.asarray(row["input_ids"], dtype=np.int32)
    mask_T = np.asarray(row["loss_mask"], dtype=bool)
    if ids_T.ndim != 1 or ids_T.shape != mask_T.shape:
      raise ValueError(f"row {row.get('id', '')!r}: loss_mask: found shape {mask_T.shape}, "
                       f"expected that of input_ids, {ids_T.shape}")
    max_len = self.config.max_len
    if not has_anchor(mask_T[:max_len]):
      self.num_skipped += 1
      return
    self.num_truncated += len(ids_T) > max_len
    self._rows.append((ids_T[:max_len], mask_T[:max_len]))

  def _make_iterator(self):
    import grain  # slow to import, and only training needs it
    dataset = grain.MapDataset.source(self._rows).seed(self.config.seed)
    if self.config.is_shuffled:
      dataset = dataset.shuffle()
    dataset = dataset.repeat(self.config.num_epochs).map(self._pad)
    dataset = dataset.batch(self.config.batch_size, drop_remainder=True)
    # Padding is cheap: no threads, so nothing runs ahead of the place that get_state reports.
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.to_iter_dataset(options))

  def _pad(self, row):
    ids_T, mask_T = row
    room = (0, self.config.max_len - len(ids_T))
    return {"input_ids": np.pad(ids_T, room, constant_values=self.config.pad_id),
            "loss_mask": np.pad(mask_T, room), "lengths": np.int32(len(ids_T))}


def _hash_rows(rows):
  digest = hashlib.sha256()
  for ids_T, mask_T in rows:
    digest.update(len(ids_T).to_bytes(4, "little") + ids_T.tobytes() + mask_T.tobytes())
  return digest.hexdigest()[:16]
