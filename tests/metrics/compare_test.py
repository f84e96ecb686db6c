import dataclasses

import pytest

from dspark_jax.metrics import compare


@dataclasses.dataclass
class Answer:
  tokens: list
  seconds: float
  prefill_seconds: float = 0.0
  num_rounds: int = 0
  num_verified: tuple = (0, 0)
  num_accepted: tuple = (0, 0)


def make_runs(answers):
  """{(method, prompt, repeat): Answer} -> runs."""
  return [compare.Run(*key, answer) for key, answer in answers.items()]


def test_methods_take_turns_in_rotating_order():
  called = []
  methods = {name: lambda p, name=name: called.append((p, name)) or Answer([1], 1.0)
             for name in "abc"}
  runs = compare.run_interleaved(methods, ["x", "y"], repeats=2)
  assert called == [("x", "a"), ("x", "b"), ("x", "c"), ("y", "b"), ("y", "c"), ("y", "a"),
                    ("x", "b"), ("x", "c"), ("x", "a"), ("y", "c"), ("y", "a"), ("y", "b")]
  assert [(r.method, r.prompt, r.repeat) for r in runs][:4] == [
      ("a", 0, 0), ("b", 0, 0), ("c", 0, 0), ("b", 1, 0)]


def test_speed_up_is_the_median_of_neighbours_ratios():
  # The machine slows down by 10 after the first prompt. Ratios are 2, 2 and 4; the ratio of the
  # methods' median speeds would be 4.
  plain = {("plain", i, 0): Answer([0] * 10, s) for i, s in enumerate((1.0, 10.0, 20.0))}
  fast = {("fast", i, 0): Answer([0] * 10, s) for i, s in enumerate((0.5, 5.0, 5.0))}
  reports = compare.summarize(make_runs(plain | fast), baseline="plain")
  assert [r.method for r in reports] == ["plain", "fast"]
  assert reports[0].speed_up == 1.0 and reports[1].speed_up == 2.0
  assert reports[0].tokens_per_s == 1.0 and reports[1].tokens_per_s == 2.0


def test_repeats_are_paired_with_the_baseline_of_the_same_repeat():
  answers = {("plain", 0, 0): Answer([1] * 4, 4.0), ("plain", 0, 1): Answer([1] * 4, 1.0),
             ("fast", 0, 0): Answer([1] * 4, 2.0), ("fast", 0, 1): Answer([1] * 4, 0.5)}
  assert compare.summarize(make_runs(answers), baseline="plain")[1].speed_up == 2.0


def test_report_by_hand():
  answers = {
      ("plain", 0, 0): Answer([5, 6, 7, 8, 9], 1.0, 0.2, 4),
      ("plain", 1, 0): Answer([5, 2], 1.0, 0.2, 1),
      # 5 tokens, the first from the prefill: 4 by two rounds.
      ("d", 0, 0): Answer([5, 6, 7, 8, 9], 0.5, 0.3, 2, (2, 1), (1, 1)),
      ("d", 1, 0): Answer([5, 3, 4], 0.5, 0.1, 1, (1, 1), (1, 0))}
  plain, drafted = compare.summarize(make_runs(answers), baseline="plain")
  assert plain.acceptance.accepted_len == 1.0 and plain.acceptance.verify_rate is None
  assert plain.different == {}
  assert drafted.acceptance.accepted_len == 6 / 3
  assert drafted.acceptance.accept_rate == [2 / 3, 1 / 2]
  assert drafted.ms_per_round == pytest.approx((100 + 400) / 2)
  assert drafted.prefill_ms == pytest.approx(200)
  assert drafted.different == {1: 1} and drafted.num_prompts == 2


def test_difference():
  assert compare.find_difference([1, 2], [1, 2]) is None
  assert compare.find_difference([1, 3], [1, 2]) == 1
  assert compare.find_difference([1], [1, 2]) == 1
  assert compare.find_difference([], [1]) == 0


def test_domains():
  answers = {("plain", 0, 0): Answer([1], 1.0), ("plain", 1, 0): Answer([1], 3.0)}
  tables = compare.summarize_domains(make_runs(answers), ["code", "chat"], baseline="plain")
  assert list(tables) == ["all", "code", "chat"]
  assert tables["chat"][0].tokens_per_s == pytest.approx(1 / 3)
  assert tables["all"][0].num_prompts == 2


def test_methods_have_one_order_in_all_tables():
  names = ("plain", "b", "c")
  answers = {(m, i, 0): Answer([1], 1.0) for i in range(2) for m in names[2 * i:] + names[:2 * i]}
  tables = compare.summarize_domains(make_runs(answers), ["x", "y"], baseline="plain")
  assert {k: tuple(r.method for r in v) for k, v in tables.items()} == dict.fromkeys(
      ("all", "x", "y"), names)


def test_baseline_must_have_run():
  with pytest.raises(ValueError, match="baseline"):
    compare.summarize(make_runs({("a", 0, 0): Answer([1], 1.0)}), baseline="plain")


def test_table_has_a_row_a_method_and_aligned_columns():
  answers = {("plain", 0, 0): Answer([1, 2], 1.0, 0.5, 1),
             ("fixed 2", 0, 0): Answer([1, 3], 0.5, 0.25, 1, (1, 1), (1, 0))}
  lines = compare.format_table(compare.summarize(make_runs(answers), baseline="plain")).split("\n")
  assert len(lines) == 3
  assert lines[1].split() == ["plain", "2.0", "1.00x", "1.00", "-", "500.0", "500", "1/1", "-"]
  assert lines[2].split() == ["fixed", "2", "4.0", "2.00x", "1.00", "0.50", "250.0", "250", "0/1",
                              "1.00", "0.00"]
  assert lines[0].index("identical") + len("identical") == lines[2].index("0/1") + 3
