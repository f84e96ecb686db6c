"""Opening GGUF files, whose tokenizer and tensors are wanted at different times."""

import functools
import os


def open_gguf(path: str | os.PathLike):
  """Returns the `gguf` package's reader; the last file stays open, for reading it takes seconds.

  Raises:
    FileNotFoundError, ValueError: one line naming the file.
  """
  status = os.stat(path)
  return _open(os.fspath(path), status.st_mtime_ns, status.st_size)


@functools.lru_cache(maxsize=1)
def _open(path: str, mtime_ns: int, size: int):
  del mtime_ns, size  # a file written anew is another file
  import gguf  # imported here: only users of GGUF files need it
  try:
    return gguf.GGUFReader(path)
  except (ValueError, IndexError, KeyError) as e:  # bad magic, version, or a file cut short
    raise ValueError(f"{path}: found no GGUF file, or a broken one ({e})") from None
