"""Freed memory stays with the process once it was asked for, and does not count as used."""

import platform
import subprocess
import sys

import pytest

MIB = 2**20
# Resident bytes that are left after a thread, as XLA has, wrote and freed 96 MiB; and used ones,
# before it freed them and after.
SCRIPT = """
import ctypes, os, sys, threading
from dspark_jax.host_memory import count_used_bytes, keep_freed_memory
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
libc.free.argtypes = [ctypes.c_void_p]
resident = lambda: int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
assert sys.argv[1] == "as it is" or keep_freed_memory()
before, used_before = resident(), count_used_bytes()
def use():
  global used_by_piece
  piece = libc.malloc(96 * 2**20)
  ctypes.memset(piece, 1, 96 * 2**20)
  used_by_piece = count_used_bytes() - used_before
  libc.free(piece)
thread = threading.Thread(target=use)
thread.start()
thread.join()
print(resident() - before, used_by_piece, count_used_bytes() - used_before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries have no mallopt")
@pytest.mark.parametrize("how, low, high", [("kept", 92, 112), ("as it is", -4, 4)])
def test_large_pieces_that_were_freed(how, low, high):
  found = subprocess.run([sys.executable, "-c", SCRIPT, how], capture_output=True, text=True,
                         check=True)
  kept, used_by_piece, used = map(int, found.stdout.split())
  assert low * MIB <= kept <= high * MIB
  assert 92 * MIB <= used_by_piece <= 112 * MIB
  assert abs(used) < 4 * MIB
