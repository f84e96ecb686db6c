"""The figures of `compare_drafters`: each asks for its cells, and writes CSV, PNG and a table."""

import copy
from typing import Any

import numpy as np

from dspark_jax.metrics import drafter_report as report
from dspark_jax.metrics.drafter_plots import plot_curves, plot_round_time
from dspark_jax.metrics.tables import format_rows, show, write_csv
from experiments._comparison import HEADLESS, PLAIN, Comparison, file_name

Families = dict[str, dict[int, str]]  # recipe -> depth or proposal length -> its variant's name


def plan_recipes(config) -> tuple[dict[str, dict], Families, Families]:
  """Returns all recipes that the figures need, and those of varied depth and of varied length."""
  known = config.recipes.to_dict()
  for field in ("drafters", "studied"):
    for name in config[field]:
      if name not in known:
        raise ValueError(f"{field}: found {name!r}, expected some of {', '.join(known)}")
  for figure in config.figures:
    if figure not in FIGURES:
      raise ValueError(f"figures: found {figure!r}, expected some of {', '.join(FIGURES)}")
    if figure in ("depth", "length") and not config.studied:
      raise ValueError(f"studied: found none, expected a recipe to vary for figure {figure!r}")
  recipes = {name: known[name] for name in config.drafters}
  families: dict[str, Families] = {"depth": {}, "length": {}}
  for kind, values in (("depth", config.depths), ("length", config.lengths)):
    for base in config.studied if kind in config.figures else ():
      families[kind][base] = {}
      for value in sorted(values):
        recipe = vary(known[base], **{kind: value})
        name = base if recipe == known[base] else f"{base}_{kind}{value}"
        recipes[name] = recipe
        families[kind][base][value] = name
  return recipes, families["depth"], families["length"]


def vary(recipe: dict, *, depth: int | None = None, length: int | None = None) -> dict:
  """Returns a recipe with another number of layers or of drafts.

  A warm start copies as many layers, up to the same last one. The loss decays with the length, as
  in the paper.
  """
  recipe = copy.deepcopy(recipe)
  drafter, warm_start = recipe["drafter"], recipe.get("warm_start", {})
  if depth is not None:
    drafter["num_layers"] = depth
    if warm_start.get("layer_ids"):
      last = warm_start["layer_ids"][-1]
      if depth > last + 1:
        raise ValueError(f"depths: found {depth}, expected at most {last + 1}: a warm start copies "
                         f"target layers up to {last}")
      warm_start["layer_ids"] = tuple(range(last - depth + 1, last + 1))
  if length is not None:
    loss = recipe["train"]["loss"]
    loss["loss_decay"] *= length / drafter["proposal_len"]
    drafter["proposal_len"] = length
  return recipe


def gather(c: Comparison, name: str, law: str, threshold: float = 0.0) -> report.Cells | None:
  """Returns a drafter's cells of all domains, None until all are there."""
  cells = {domain: c.evaluate(name, law, domain, threshold) for domain in c.domains}
  return None if None in cells.values() else cells


def draw_table(c: Comparison, times, **unused) -> None:
  """Table 1: tau by domain, tokens/s, milliseconds of a round, parameters; the leads."""
  rows, leads = [], []
  names = [PLAIN, *c.config.drafters, *c.config.untrained]
  for law in c.config.laws:
    cells = {name: found for name in names if (found := gather(c, name, law))}
    of_law = [row for name in cells for row in report.make_rows(
        law, file_name(name), cells[name], about=describe(c, name, times), seed=c.config.seed)]
    if of_law:
      print(f"\n{law}: " + ", ".join(f"{k} {v:g}" for k, v in c.laws[law].items()) + "\n"
            + report.format_comparison(of_law))
    rows += of_law
    leads += find_leads(c, law, [(c.config.lead_of, n) for n in names[1:]], cells)
  save(c, "table", rows)
  save_leads(c, "table", leads)


def describe(c: Comparison, name: str, times) -> dict[str, Any]:
  time = times.get(name)
  return dict(parameters=c.train(name)["parameters"] if name in c.recipes else None,
              draft_ms=time and time.draft_ms, verify_ms=time and time.verify_ms)


def draw_positions(c: Comparison, **unused) -> None:
  """Figure 2: by draft position, the accept rate given that all drafts before were accepted."""
  rows, panels = [], {domain: {} for domain in c.domains}
  for name in (*c.config.drafters, *c.config.untrained):
    cells = gather(c, name, c.config.study_law)
    for domain, cell in (cells or {}).items():
      rates = cell.evaluate().conditional_rate
      reached_G = np.sum([n.reached_G for n in cell.counts], axis=0)
      rows += [dict(drafter=file_name(name), domain=domain, position=k + 1, rate=rate,
                    rounds=int(reached_G[k])) for k, rate in enumerate(rates)]
      points = [(k + 1, rate, None, None) for k, rate in enumerate(rates) if rate is not None]
      panels[domain] |= {file_name(name): points} if points else {}
  if save(c, "positions", rows):
    plot_curves(panels, c.workdir / "positions.png", xlabel="draft position",
                ylabels=["accepted, if all before were"] * len(panels),
                title="Conditional acceptance by position")


def draw_depth(c: Comparison, depth: Families, **unused) -> None:
  """Figure 3: tau by the number of draft layers; leads over the other family's deepest."""
  rows, lines, cells = study(c, depth, "depth")
  first, *others = depth
  leads = find_leads(c, c.config.study_law, [
      (name, depth[other][max(depth[other])]) for other in others
      for name in depth[first].values()], cells)
  if save(c, "depth", rows):
    plot_curves({"": lines}, c.workdir / "depth.png", xlabel="draft layers",
                ylabels=["tau, mean over domains"], title="Accepted length by depth")
  save_leads(c, "depth", leads)


def draw_length(c: Comparison, length: Families, times, **unused) -> None:
  """Figure 4: tau and a round's milliseconds by proposal length; leads at every length."""
  rows, lines, cells = study(c, length, "proposal_len")
  for row in rows:
    time = times.get(row["drafter"])
    row |= dict(draft_ms=time and time.draft_ms, verify_ms=time and time.verify_ms,
                round_ms=time and time.draft_ms + time.verify_ms)
  ms = {base: [(row["proposal_len"], row["round_ms"], None, None) for row in rows
               if row["family"] == base and row["round_ms"]] for base in length}
  first, *others = length
  leads = find_leads(c, c.config.study_law, [
      (length[first][n], length[other][n]) for other in others for n in length[first]], cells)
  if save(c, "length", rows):
    plot_curves({"accepted length": lines, "latency": {b: p for b, p in ms.items() if p}},
                c.workdir / "length.png", xlabel="proposal length",
                ylabels=["tau, mean over domains", "milliseconds a round"],
                title="Proposal length")
  save_leads(c, "length", leads)


def study(c: Comparison, families: Families, field: str):
  """Returns (rows, lines, cells by name) of macro tau over a varied number."""
  rows, lines, cells = [], {}, {}
  for base, variants in families.items():
    for value, name in variants.items():
      found = gather(c, name, c.config.study_law)
      if found is None:
        continue
      cells[name] = found
      tau = report.estimate_tau(found, seed=c.config.seed)
      rows.append({"family": base, field: value, "drafter": name, "tau": tau.value,
                   "low": tau.low, "high": tau.high})
      lines.setdefault(base, []).append((value, tau.value, tau.low, tau.high))
  return rows, lines, cells


def draw_thresholds(c: Comparison, **unused) -> None:
  """Figure 5: what a static confidence threshold trades: tau against wasted verification."""
  rows, panels = [], {"acceptance": {}, "accepted length": {}}
  for name in c.config.drafters:
    if not getattr(c.runs[name].drafter, "enable_confidence_head", False):
      continue
    for threshold in sorted(c.config.thresholds):
      for domain, cell in (gather(c, name, c.config.study_law, threshold) or {}).items():
        e, label = cell.evaluate(c.config.seed), f"{name}, {domain}"
        tau, share = e.accepted_len, e.acceptance.verify_rate
        rows.append(dict(drafter=name, domain=domain, threshold=threshold, tau=tau.value,
                         low=tau.low, high=tau.high, proposal_len=e.acceptance.verify_len,
                         accepted_share=share))
        panels["accepted length"].setdefault(label, []).append(
            (threshold, tau.value, tau.low, tau.high))
        if share is not None:
          panels["acceptance"].setdefault(label, []).append((threshold, share, None, None))
  if save(c, "thresholds", rows):
    plot_curves(panels, c.workdir / "thresholds.png", xlabel="confidence threshold",
                ylabels=["accepted of the verified drafts", "tau"],
                title="Static confidence threshold")


def draw_head_share(c: Comparison, times, **unused) -> None:
  """What the sequential head adds to a round, of every drafter that has one."""
  rows = []
  for name, time in times.items():
    bare = times.get(name + HEADLESS)
    if bare is not None:
      head_ms = time.draft_ms - bare.draft_ms
      rows.append(dict(
          drafter=name, proposal_len=c.runs[name].drafter.proposal_len, backbone_ms=bare.draft_ms,
          head_ms=head_ms, verify_ms=time.verify_ms,
          share=head_ms / (time.draft_ms + time.verify_ms)))
  if save(c, "head_share", rows):
    print("\n" + format_rows([("sequential head", "drafts", "head ms", "round ms", "share")] + [
        (r["drafter"], str(r["proposal_len"]), show(r["head_ms"], 3),
         show(r["backbone_ms"] + r["head_ms"] + r["verify_ms"]), f"{100 * r['share']:.1f}%")
        for r in rows]))
    plot_round_time(rows, c.workdir / "head_share.png")


FIGURES = {"table": draw_table, "positions": draw_positions, "depth": draw_depth,
           "length": draw_length, "thresholds": draw_thresholds, "head_share": draw_head_share}


def find_leads(c: Comparison, law: str, pairs: list[tuple[str, str]], cells) -> list[dict]:
  """Returns how much longer the first of each pair accepts, where both are there."""
  leads = []
  for name, other in pairs:
    if name != other and name in cells and other in cells:
      lead = report.estimate_lead(cells[name], cells[other], seed=c.config.seed)
      leads.append(dict(law=law, drafter=file_name(name), over=file_name(other), lead=lead.value,
                        low=lead.low, high=lead.high))
  return leads


def save_leads(c: Comparison, name: str, leads: list[dict]) -> None:
  if save(c, f"{name}_leads", leads):
    percent = lambda x: "-" if x is None else f"{100 * x:+.1f}%"
    print("\n" + format_rows([("macro tau of", "over", "law", "lead", "low", "high")] + [
        (r["drafter"], r["over"], r["law"], *(percent(r[n]) for n in ("lead", "low", "high")))
        for r in leads], left=(0, 1, 2)))


def save(c: Comparison, name: str, rows: list[dict]) -> bool:
  """Writes a CSV, unless nothing is there yet."""
  if rows:
    write_csv(c.workdir / f"{name}.csv", rows)
  return bool(rows)
