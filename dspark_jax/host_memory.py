"""How a CPU process treats memory that XLA has freed, and how much is in use."""

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of malloc.h
_LARGE, _HUGE_PAGE = 2**30, 2**21
_MADV_HUGEPAGE = 14


class _MallInfo2(ctypes.Structure):
  """glibc's `struct mallinfo2`."""
  _fields_ = [(name, ctypes.c_size_t) for name in (
      "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks",
      "keepcost")]


def tune_malloc() -> bool:
  """Makes malloc keep what is freed, in huge pages; False where the C library cannot.

  XLA allocates its scratch memory anew for every run of a program. glibc gives pieces of 32 MiB and
  more back to the system, which hands them out again page by page, cleared: 5 of the 57 ms of a
  round with 16 rows of SmolLM2-135M. The arenas that threads have of their own end at 64 MiB, so
  all share the first one. Where Linux gives huge pages to those who ask, they are asked for, over
  the next 2 GiB of that arena: a round of one request then takes 0.94 of the time (median of 4
  pairs of processes). For programs to call at their start; a library should not.
  """
  try:
    libc = ctypes.CDLL(None)
    mallopt, libc.malloc.restype = libc.mallopt, ctypes.c_void_p
  except (AttributeError, OSError, TypeError):  # not glibc
    return False
  values = {_ARENA_MAX: 1, _MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: 2 * _LARGE - 1}
  is_set = all([mallopt(name, value) for name, value in values.items()])
  if is_set:
    _ask_for_huge_pages(libc)
  return is_set


def _ask_for_huge_pages(libc: ctypes.CDLL) -> None:
  """Grows the heap by pieces as large as it keeps, unused as yet, and frees them again."""
  size = _LARGE - 2 * _HUGE_PAGE
  pieces = [libc.malloc(ctypes.c_size_t(size)) for _ in range(2)]
  for start in filter(None, pieces):
    first, end = -(-start // _HUGE_PAGE) * _HUGE_PAGE, start + size
    libc.madvise(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _MADV_HUGEPAGE)
    libc.free(ctypes.c_void_p(start))


def count_used_bytes() -> int | None:
  """Returns the bytes that a process uses, None where the system cannot tell.

  They are what malloc has handed out and not got back: on CPU XLA's arrays and scratch memory too,
  and no matter what the highest peak was; and Python's small objects, of which only the number is
  known, as if each had 64 bytes. Where the C library does not count (glibc before 2.33, or another)
  they are what is resident.
  """
  try:
    mallinfo2 = ctypes.CDLL(None).mallinfo2
  except (AttributeError, OSError, TypeError):
    return _count_resident_bytes()
  mallinfo2.restype = _MallInfo2
  found = mallinfo2()
  return found.uordblks + found.hblkhd + 64 * sys.getallocatedblocks()


def _count_resident_bytes() -> int | None:
  try:
    with open("/proc/self/statm", encoding="ascii") as file:
      return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
  except OSError:  # not Linux
    return None
