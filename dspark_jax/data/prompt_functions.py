"""Small Python tasks with a reference solution each, so that every example shown is computed."""

import string

from dspark_jax.data.prompt_slots import NAMES, pick


def _ints(rng, low=-9, high=30, size=(3, 6)):
  return [rng.randint(low, high) for _ in range(rng.randint(*size))]


def _word(rng, alphabet="abcdeilmnorst"):
  return "".join(pick(rng, alphabet) for _ in range(rng.randint(3, 8)))


def _sentence(rng):
  words = ("the", "quick", "storm", "left", "every", "old", "boat", "near", "a", "quiet", "harbour",
           "while", "two", "gulls", "slept", "on", "its", "mast")
  return " ".join(rng.sample(words, rng.randint(3, 7)))


def _stock(rng):
  goods = ("tea", "rice", "salt", "figs", "oats", "honey", "beans")
  return {name: rng.randint(0, 20) for name in rng.sample(goods, rng.randint(2, 4))}


def _pairs(rng):
  return [(pick(rng, NAMES), rng.randint(20, 99)) for _ in range(rng.randint(2, 4))]


def _grid(rng):
  width = rng.randint(2, 4)
  return [[rng.randint(0, 9) for _ in range(width)] for _ in range(rng.randint(2, 3))]


def _merge_counts(first, second):
  return {key: first.get(key, 0) + second.get(key, 0) for key in sorted(first | second)}


def _run_lengths(text):
  runs = []
  for char in text:
    if runs and runs[-1][0] == char:
      runs[-1] = (char, runs[-1][1] + 1)
    else:
      runs.append((char, 1))
  return runs


def _longest_climb(values):
  best = length = min(1, len(values))
  for before, after in zip(values, values[1:]):
    length = length + 1 if after > before else 1
    best = max(best, length)
  return best


def _caesar_shift(text, shift):
  return "".join(
    chr((ord(c) - 97 + shift) % 26 + 97) if c in string.ascii_lowercase else c for c in text)


def _collatz(n):
  steps = 0
  while n != 1:
    n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
  return steps


def _change(amount, coins=(50, 20, 10, 5, 2, 1)):
  result = []
  for coin in coins:
    result += [coin] * (amount // coin)
    amount %= coin
  return result


# name, parameters, return type, docstring, solution, drawer of the arguments of one example.
FUNCTIONS = (
  ("second_largest", "values: list[int]", "int",
   "Return the second largest distinct value, or 0 if there is none.",
   lambda v: sorted(set(v))[-2] if len(set(v)) > 1 else 0, lambda r: (_ints(r),)),
  ("collatz_steps", "n: int", "int",
   "Count the steps of the Collatz rule from n down to 1: halve even numbers, turn odd ones into "
   "3n + 1.",
   _collatz, lambda r: (r.randint(1, 30),)),
  ("longest_climb", "values: list[int]", "int",
   "Return the length of the longest stretch in which each value is greater than the one "
   "before it.",
   _longest_climb, lambda r: (_ints(r, size=(4, 8)),)),
  ("merge_counts", "first: dict[str, int], second: dict[str, int]", "dict[str, int]",
   "Add two stock lists; the keys of the result are in alphabetical order.", _merge_counts,
   lambda r: (_stock(r), _stock(r))),
  ("sold_out", "stock: dict[str, int]", "list[str]",
   "Return the names, in alphabetical order, of the goods of which fewer than five are left.",
   lambda s: sorted(k for k, v in s.items() if v < 5), lambda r: (_stock(r),)),
  ("best_student", "results: list[tuple[str, int]]", "str",
   "Return the name with the highest score; the first one wins a tie.",
   lambda p: max(p, key=lambda x: x[1])[0], lambda r: (_pairs(r),)),
  ("run_lengths", "text: str", "list[tuple[str, int]]",
   "Return each run of equal characters with its length.",
   _run_lengths, lambda r: ("".join(pick(r, "aabcc") for _ in range(r.randint(4, 9))),)),
  ("caesar_shift", "text: str, shift: int", "str",
   "Shift every lower-case letter forward by `shift` places in the alphabet, wrapping after z.",
   _caesar_shift,
   lambda r: (_sentence(r), r.randint(1, 9))),
  ("column_sums", "grid: list[list[int]]", "list[int]",
   "Return the sum of each column of a rectangular grid.",
   lambda g: [sum(c) for c in zip(*g)], lambda r: (_grid(r),)),
  ("row_maxima", "grid: list[list[int]]", "list[int]", "Return the largest entry of each row.",
   lambda g: [max(row) for row in g], lambda r: (_grid(r),)),
  ("border_total", "grid: list[list[int]]", "int",
   "Return the sum of the entries in the first and the last row.",
   lambda g: sum(g[0]) + sum(g[-1]), lambda r: (_grid(r),)),
  ("turn_clockwise", "grid: list[list[int]]", "list[list[int]]",
   "Turn a rectangular grid by a quarter turn clockwise.",
   lambda g: [list(row) for row in zip(*g[::-1])], lambda r: (_grid(r),)),
  ("initials", "names: list[str]", "str",
   "Return the first letters of the names, each followed by a dot.",
   lambda n: "".join(x[0] + "." for x in n), lambda r: (r.sample(NAMES, r.randint(2, 4)),)),
  ("longest_word", "sentence: str", "str",
   "Return the longest word of the sentence; the first one wins a tie.",
   lambda s: max(s.split(), key=len), lambda r: (_sentence(r),)),
  ("title_lengths", "sentence: str", "list[int]", "Return the number of letters of each word.",
   lambda s: [len(w) for w in s.split()], lambda r: (_sentence(r),)),
  ("swap_ends", "word: str", "str", "Return the word with its first and last letters exchanged.",
   lambda w: w[-1] + w[1:-1] + w[0], lambda r: (_word(r),)),
  ("every_nth_letter", "text: str, n: int", "str",
   "Return the letters at places 0, n, 2n and so on.",
   lambda t, n: t[::n], lambda r: (_sentence(r), r.randint(2, 4))),
  ("vowel_positions", "word: str", "list[int]",
   "Return the zero-based places of the vowels a, e, i, o, u.",
   lambda w: [i for i, c in enumerate(w) if c in "aeiou"], lambda r: (_word(r),)),
  ("make_change", "amount: int", "list[int]",
   "Pay an amount of cents with as few coins of 50, 20, 10, 5, 2 and 1 as possible, largest first.",
   _change, lambda r: (r.randint(3, 140),)),
  ("minutes_to_clock", "minutes: int", "str",
   "Turn minutes after midnight into a time such as '07:05'.",
   lambda m: f"{m // 60 % 24:02d}:{m % 60:02d}", lambda r: (r.randint(0, 1439),)),
  ("clock_to_minutes", "clock: str", "int",
   "Turn a time such as '07:05' into minutes after midnight.",
   lambda c: int(c[:2]) * 60 + int(c[3:]),
   lambda r: (f"{r.randint(0, 23):02d}:{r.randint(0, 59):02d}",)),
  ("is_leap_year", "year: int", "bool", "Tell whether a year has a 29th of February.",
   lambda y: y % 4 == 0 and (y % 100 != 0 or y % 400 == 0),
   lambda r: (pick(r, (1900, 2000, 1996, 2019, 2024, 2100, 2023)),)),
  ("digit_root", "n: int", "int", "Add up the digits of n again and again until one digit is left.",
   lambda n: 0 if n == 0 else 1 + (n - 1) % 9, lambda r: (r.randint(5, 99999),)),
  ("nearest_multiple", "n: int, step: int", "int",
   "Return the largest multiple of `step` that is not above n.",
   lambda n, s: n // s * s, lambda r: (r.randint(10, 200), r.randint(2, 15))),
  ("overlap", "first: list[int], second: list[int]", "list[int]",
   "Return, in rising order and without repeats, the values found in both lists.",
   lambda a, b: sorted(set(a) & set(b)), lambda r: (_ints(r, 0, 9), _ints(r, 0, 9))),
  ("only_in_one", "first: list[int], second: list[int]", "list[int]",
   "Return, in rising order, the values found in exactly one of the lists.",
   lambda a, b: sorted(set(a) ^ set(b)), lambda r: (_ints(r, 0, 9), _ints(r, 0, 9))),
  ("dot_product", "first: list[int], second: list[int]", "int",
   "Multiply the lists pairwise and add up; extra values of the longer list are ignored.",
   lambda a, b: sum(x * y for x, y in zip(a, b)), lambda r: (_ints(r, -3, 5), _ints(r, -3, 5))),
  ("weave", "first: list[int], second: list[int]", "list[int]",
   "Take values from both lists in turn until the shorter one ends.",
   lambda a, b: [x for pair in zip(a, b) for x in pair], lambda r: (_ints(r), _ints(r))),
  ("count_crossings", "temperatures: list[int]", "int",
   "Count how often two neighbouring readings lie on different sides of zero; zero counts as "
   "positive.",
   lambda t: sum((a < 0) != (b < 0) for a, b in zip(t, t[1:])),
   lambda r: (_ints(r, -9, 9, (4, 7)),)),
  ("largest_jump", "values: list[int]", "int",
   "Return the largest absolute difference of two neighbours.",
   lambda v: max(abs(a - b) for a, b in zip(v, v[1:])), lambda r: (_ints(r),)),
  ("move_zeros", "values: list[int]", "list[int]",
   "Move all zeros to the end and keep the order of the other values.",
   lambda v: [x for x in v if x] + [0] * v.count(0),
   lambda r: ([pick(r, (0, 0, 3, 7, 5, 1)) for _ in range(6)],)),
  ("split_at", "values: list[int], limit: int", "tuple[list[int], list[int]]",
   "Split into the values below the limit and all others, each in the given order.",
   lambda v, k: ([x for x in v if x < k], [x for x in v if x >= k]),
   lambda r: (_ints(r), r.randint(0, 20))),
  ("moving_totals", "values: list[int], width: int", "list[int]",
   "Return the sum of each window of `width` neighbouring values.",
   lambda v, w: [sum(v[i:i + w]) for i in range(len(v) - w + 1)],
   lambda r: (_ints(r, size=(4, 6)), r.randint(2, 3))),
  ("most_common_letter", "text: str", "str",
   "Return the most frequent letter, the first in the alphabet if several are.",
   lambda t: min(set(t) - {" "}, key=lambda c: (-t.count(c), c)), lambda r: (_sentence(r),)),
  ("letters_missing", "word: str, alphabet: str", "str",
   "Return the letters of the alphabet that the word does not use.",
   lambda w, a: "".join(c for c in a if c not in w), lambda r: (_word(r), "aeimnorst")),
  ("invert", "table: dict[str, int]", "dict[int, list[str]]",
   "Map each value to the alphabetical list of its keys.",
   lambda t: {v: sorted(k for k in t if t[k] == v) for v in sorted(set(t.values()))},
   lambda r: ({k: r.randint(1, 3) for k in r.sample(("tea", "rice", "salt", "figs"), 3)},)),
  ("count_pairs", "values: list[int], total: int", "int",
   "Count the pairs of places i < j whose values add up to `total`.",
   lambda v, t: sum(v[i] + v[j] == t for i in range(len(v)) for j in range(i + 1, len(v))),
   lambda r: (_ints(r, 0, 6, (4, 6)), r.randint(3, 9))),
  ("triangle_kind", "a: int, b: int, c: int", "str",
   "Return 'equilateral', 'isosceles', 'scalene', or 'none' if the sides form no triangle.",
   lambda a, b, c: "none" if a + b + c <= 2 * max(a, b, c) else
   {1: "equilateral", 2: "isosceles", 3: "scalene"}[len({a, b, c})],
   lambda r: (r.randint(2, 6), r.randint(2, 6), r.randint(2, 6))),
  ("grade", "points: int", "str", "Return 'A' from 90 points, 'B' from 75, 'C' from 60, else 'F'.",
   lambda p: "A" if p >= 90 else "B" if p >= 75 else "C" if p >= 60 else "F",
   lambda r: (r.randint(40, 100),)),
  ("fill_template", "template: str, values: dict[str, int]", "str",
   "Replace every key written in angle brackets by its value.",
   lambda t, v: t.replace("<a>", str(v["a"])).replace("<b>", str(v["b"])),
   lambda r: (pick(r, ("<a> and <b>", "<b>, <a>, <b>", "from <a> to <b>")),
     {"a": r.randint(0, 9), "b": r.randint(0, 9)})),
  ("spread_evenly", "total: int, parts: int", "list[int]",
   "Split `total` into whole parts that differ by at most one, larger parts first.",
   lambda t, p: [t // p + (i < t % p) for i in range(p)],
   lambda r: (r.randint(5, 60), r.randint(2, 6))),
  ("is_rotation", "first: str, second: str", "bool",
   "Tell whether the second word arises from the first by moving letters from the front to the "
   "end.",
   lambda a, b: len(a) == len(b) and b in a + a,
   lambda r: pick(r, (("stone", "onest"), ("boat", "atob"), ("lamp", "palm"),
                      ("river", "verri")))),
)
