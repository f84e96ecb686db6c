"""Freed memory stays with the process once it was asked for, and does not count as used."""

import pathlib
import platform
import subprocess
import sys

import pytest

MIB = 2**20
# Resident bytes that are left after a thread, as XLA has, wrote and freed 96 MiB; used ones, before
# it freed them and after; and those that lay in huge pages.
SCRIPT = """
import ctypes, os, sys, threading
from dspark_jax.host_memory import count_used_bytes, tune_malloc
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
assert sys.argv[1] == "as it is" or tune_malloc()
def count_huge():
  lines = open("/proc/self/smaps_rollup").read().splitlines()
  return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages"))
before, used_before = resident(), count_used_bytes()
def use():
  global used_by_piece, huge
  piece = libc.malloc(96 * 2**20)
  ctypes.memset(piece, 1, 96 * 2**20)
  used_by_piece, huge = count_used_bytes() - used_before, count_huge()
  libc.free(piece)
thread = threading.Thread(target=use)
thread.start()
thread.join()
print(resident() - before, used_by_piece, count_used_bytes() - used_before, huge)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize("how, low, high", [("kept", 92, 112), ("as it is", -4, 4)])
def test_large_pieces_that_were_freed(how, low, high):
  found = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True,
                         check=True)
  kept, used_by_piece, used, huge = map(int, found.stdout.split())
  assert low * MIB <= kept <= high * MIB
  assert 92 * MIB <= used_by_piece <= 112 * MIB
  assert abs(used) < 4 * MIB
  choice = pathlib.Path("/sys/kernel/mm/transparent_hugepage/enabled")
  if choice.is_file() and "[madvise]" in choice.read_text():
    assert huge > 64 * MIB if how == "kept" else huge < 8 * MIB
