"""How a CPU process treats memory that XLA has freed, and how much is in use."""

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGE = 2**30


class _MallInfo2(ctypes.Structure):
  """glibc's `struct mallinfo2`."""
  _fields_ = [(name, ctypes.c_size_t) for name in (
      "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
      "keepcost")]


def keep_freed_memory() -> bool:
  """Makes malloc keep what is freed, up to 1 GiB a piece; False where the C library cannot.

  XLA allocates its scratch memory anew for every run of a program. glibc gives pieces of 32 MiB and
  more back to the system, which hands them out again page by page, cleared: 5 of the 57 ms of a
  round with 16 rows of SmolLM2-135M. The arenas that threads have of their own end at 64 MiB, so
  all share the first one. For programs to call at their start; a library should not.
  """
  try:
    mallopt = ctypes.CDLL(None).mallopt
  except (AttributeError, OSError, TypeError):  # not glibc
    return False
  values = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: 2 * _LARGE - 1}
  return all([mallopt(name, value) for name, value in values.items()])


def count_used_bytes() -> int | None:
  """Returns the bytes that a process really uses, None where the system cannot tell.

  These are what is resident, less what malloc keeps for later: the highest peak so far does not
  count. On CPU they hold XLA's arrays, programs and scratch memory too.
  """
  try:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    with open("/proc/self/statm") as file:
      resident = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except (AttributeError, OSError, TypeError):  # not Linux, not glibc, or one before 2.33
    return None
  mallinfo2.restype = _MallInfo2
  return resident - mallinfo2().fordblks
