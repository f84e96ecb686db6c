import numpy as np
import pytest

from dspark_jax.metrics import evaluation as lib
from dspark_jax.metrics.tables import format_rows, show, write_csv

# Three rounds of 2, 3 and 3 verified drafts, of which 2, 0 and 1 pass: 3 + 1 + 2 tokens.
COUNTS = lib.count_rounds(7, verify_lens_N=[2, 3, 3], num_accepted_N=[2, 0, 1],
                          num_new_N=[3, 1, 2], proposal_len=3)


def test_counts_by_hand():
  assert COUNTS == lib.Counts(num_tokens=7, num_rounds=3, num_committed=6, verified_G=[3, 3, 2],
                              reached_G=[3, 2, 0], accepted_G=[2, 1, 0])


def test_columns_by_hand():
  found = lib.evaluate_counts([COUNTS], seconds=2.0, num_decoded=8)
  assert found.acceptance.accepted_len == found.accepted_len.value == 2.0
  assert found.acceptance.verify_len == pytest.approx(8 / 3)
  assert found.verify_rate == pytest.approx(6 / (8 + 3))  # tokens, by rows that the target read
  assert found.acceptance.accept_rate == [2 / 3, 1 / 3, 0.0]
  assert found.conditional_rate == [2 / 3, 1 / 2, None]  # nobody reached the third
  assert found.tokens_per_s == 4.0 and found.rounds_per_s == 1.5 and found.num_tokens == 7
  assert found.accepted_len.low is None  # one prompt


def test_answers_are_pooled_by_their_rounds():
  other = lib.count_rounds(2, verify_lens_N=[3], num_accepted_N=[0], num_new_N=[1], proposal_len=3)
  found = lib.evaluate_counts([COUNTS, other], seconds=1.0, num_decoded=9)
  assert found.accepted_len.value == 7 / 4 and found.num_answers == 2
  assert (found.accepted_len.low, found.accepted_len.high) == (1.0, 2.0)


def test_nothing_decoded_but_a_first_token():
  empty = lib.count_rounds(1, verify_lens_N=[], num_accepted_N=[], num_new_N=[], proposal_len=2)
  found = lib.evaluate_counts([empty], seconds=1.0, num_decoded=1)
  assert found.accepted_len.value == 0.0 and found.conditional_rate == [None, None]


def test_positions_by_hand():
  """Confidence .5 throughout: survival .5, .25. A draft that was not verified says nothing."""
  first, second = lib.measure_positions(np.zeros((4, 2)), [2, 2, 1, 1], [2, 1, 1, 0])
  assert (first.num, first.mean_predicted, first.mean_outcome) == (4, .5, .75)
  assert first.ece == pytest.approx(.25) and first.brier == pytest.approx(.25)
  assert (second.num, second.mean_predicted, second.mean_outcome) == (2, .25, .5)
  means = lib.mean_positions([first, second])
  assert means["ece"] == pytest.approx((4 * .25 + 2 * .25) / 6)
  assert means["mean_outcome"] == pytest.approx((4 * .75 + 2 * .5) / 6)
  assert lib.mean_positions([])["ece"] is None


def test_tables():
  found = lib.evaluate_counts([COUNTS], seconds=2.0, num_decoded=8)
  header, row = lib.format_evaluations({"maths": found}).splitlines()
  assert row.split() == ["maths", "2.67+1", "2.00", "-", "0.5455", "1", "7", "4.00", "1.50",
                         "0.6667", "0.3333", "0.0000"]
  assert header.index("tau") + 3 == row.index("2.00") + 4
  text = lib.format_positions("confidence", lib.measure_positions(np.zeros((2, 1)), [1, 1], [1, 0]))
  assert text.splitlines()[1].split() == ["draft", "1", "2", "0.0000", "0.5000", "0.2500",
                                          "0.5000", "0.5000"]


def test_rows_and_csv(tmp_path):
  assert format_rows([("a", "b"), ("long", "1")]) == "a     b\nlong  1"
  assert format_rows([("a", "b"), ("1", "long")], left=(-1,)) == "a  b\n1  long"
  assert show(None) == "-" and show(.125, 1) == "0.1"
  path = write_csv(tmp_path / "new" / "t.csv", [dict(a=1, b=None), dict(a="x,y", b=2.5)])
  assert path.read_text().splitlines() == ["a,b", "1,", '"x,y",2.5']
