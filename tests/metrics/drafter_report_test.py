"""Table 1 and leads by hand, and the figures' files."""

import pytest

from dspark_jax.metrics import drafter_plots
from dspark_jax.metrics import drafter_report as lib
from dspark_jax.metrics.evaluation import Counts


def make_cell(*answers, seconds=2.0):
  """A cell of answers (rounds, committed tokens), three drafts verified in every round."""
  counts = []
  for r, c in answers:
    accepted_G = [min(max(c - (k + 1) * r, 0), r) for k in range(3)]
    counts.append(Counts(num_tokens=c + 1, num_rounds=r, num_committed=c, verified_G=[r] * 3,
                         reached_G=[r, *accepted_G[:2]], accepted_G=accepted_G))
  return lib.Cell(counts, seconds, num_decoded=sum(c.num_tokens for c in counts))


LONG = {"maths": make_cell((2, 4), (2, 4)), "chat": make_cell((1, 4), (10, 40))}
SHORT = {"maths": make_cell((2, 2), (2, 2)), "chat": make_cell((4, 8), (20, 40))}


def test_domains_weigh_the_same():
  """Tau 2 and 4: 3 in the mean, though chat has 11 of the 15 rounds (pooled: 52 / 15)."""
  found = lib.estimate_tau(LONG)
  assert found.value == pytest.approx(3.0)
  assert (found.low, found.high) == pytest.approx((3.0, 3.0))  # all prompts of a domain are alike


def test_lead_is_paired():
  """Macro 3 over (1 + 2) / 2: twice as long, on every draw of prompts."""
  lead = lib.estimate_lead(LONG, SHORT)
  assert (lead.value, lead.low, lead.high) == pytest.approx((1.0, 1.0, 1.0))
  with pytest.raises(ValueError, match="other domains or prompts"):
    lib.estimate_lead(LONG, {"maths": SHORT["maths"]})
  with pytest.raises(ValueError, match="other domains or prompts"):
    lib.estimate_lead(LONG, SHORT | {"chat": make_cell((4, 8))})


def test_lead_of_prompts_that_differ_has_an_interval_around_it():
  first = {"x": make_cell((1, 2), (1, 4), (1, 3), (1, 5))}
  second = {"x": make_cell((1, 2), (1, 2), (1, 2), (1, 2))}
  lead = lib.estimate_lead(first, second)
  assert lead.value == pytest.approx(.75) and 0 < lead.low < .75 < lead.high < 1.5


def test_rows_and_table_by_hand():
  about = dict(parameters=1_500_000, draft_ms=2.0, verify_ms=None)
  rows = lib.make_rows("greedy", "a", LONG, about=about)
  assert [(r["domain"], r["tau"], r["rounds"], r["answers"]) for r in rows] == [
      ("maths", 2.0, 4, 2), ("chat", 4.0, 11, 2), ("macro", 3.0, 15, 4)]
  assert rows[0]["tokens_per_s"] == 5.0 and rows[2]["tokens_per_s"] == (5 + 23) / 2
  assert rows[0]["verify_rate"] == 0.5 and rows[0]["proposal_len"] == 3.0  # 2 of 3 + 1 rows
  rows += lib.make_rows("greedy", "plain", SHORT, about=dict.fromkeys(about))
  lines = lib.format_comparison(rows).splitlines()
  assert len(lines) == 3 and "tau maths" in lines[0] and "tau macro" in lines[0]
  assert lines[1].split() == ["a", "1.5", "2.00", "[2.00,", "2.00]", "4.00", "[4.00,", "4.00]",
                              "3.00", "[3.00,", "3.00]", "14.0", "2.00", "-"]
  assert lines[2].split()[:2] == ["plain", "-"]


def test_figures(tmp_path):
  lines = {"a": [(1, 2.0, 1.5, 2.5), (2, 3.0, None, None), (3, 3.0, 3.5, 4.0)],
           "b": [(1, 1.0, None, None)]}
  for panels in ({"x": lines, "y": {"b": lines["b"]}}, {"": lines}, {"nothing": {}}):
    path = drafter_plots.plot_curves(panels, tmp_path / "new" / "c.png", xlabel="x",
                                     ylabels=["y"] * len(panels), title="t")
    assert path.read_bytes().startswith(b"\x89PNG")
  rows = [dict(drafter=n, backbone_ms=3.0, head_ms=h, verify_ms=9.0, share=h / 12)
          for n, h in (("a", .5), ("b", -.1))]
  path = drafter_plots.plot_round_time(rows, tmp_path / "t.png")
  assert path.read_bytes().startswith(b"\x89PNG")
