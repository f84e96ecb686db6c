"""Decodes prompts from the command line: `python -m dspark_jax.infer --prompt "..."`."""

import argparse
import dataclasses
import json
import os
import sys

from dspark_jax.api import DSpark, Generation
from dspark_jax.host_memory import tune_malloc
from dspark_jax.scheduler.policies import EarlyStop, Lagged

POLICIES = {"early_stop": EarlyStop, "lagged": Lagged}


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
  parser = argparse.ArgumentParser(prog="python -m dspark_jax.infer", description=__doc__)
  add = parser.add_argument
  add("--model", default="smollm2-135m-instruct",
      help="target: packaged name, HF directory, .gguf file or hub id (default: %(default)s)")
  add("--draft-model", default="auto",
      help="directory or hub id of a drafter or of a small model with the same tokenizer; "
      "'prompt-lookup'; 'auto' = the one shipped for the target; 'none' = plain")
  add("--prompt", action="append", help="user message, may be repeated; default: standard input")
  add("--raw", action="store_true", help="take the prompt as it is, without the chat template")
  add("--no-thinking", action="store_true",
      help="turn off the thinking of a chat template that has the switch (Qwen3)")
  add("--max-new-tokens", type=int, help="default 128")
  add("--max-length", type=int, help="bound on prompt + answer, instead of --max-new-tokens")
  add("--max-draft-len", type=int, help="most drafts verified a round")
  add("--confidence-threshold", type=float, default=0.0,
      help="stop before the first draft below this confidence; 0 = off")
  add("--accept-rule", default="token", choices=("token", "block"),
      help="both are exact; block accepts at least as many drafts (default: %(default)s)")
  add("--policy", choices=tuple(POLICIES),
      help="verify what pays by the measured step curve, instead of a fixed length or threshold")
  add("--temperature", type=float, default=0.0, help="0 = greedy")
  add("--top-k", type=int, default=0, help="0 = off")
  add("--top-p", type=float, default=1.0, help="1 = off")
  add("--min-p", type=float, default=0.0, help="0 = off")
  add("--seed", type=int, default=0)
  add("--dtype", default="float32", choices=("float32", "bfloat16"))
  add("--stream", action="store_true", help="print text as it comes (one prompt)")
  add("--json", action="store_true", help="print one JSON object a prompt")
  add("--compare", action="store_true", help="also decode plainly: speed, and identity if greedy")
  return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
  args = parse_args(argv)
  tune_malloc()
  try:
    run(args)
  except BrokenPipeError:  # the reader went away, as `head` does
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the exit complains again
    return 1
  except (ValueError, OSError) as e:
    print(f"error: {e}", file=sys.stderr)
    return 2
  return 0


def run(args: argparse.Namespace) -> None:
  prompts = args.prompt if args.prompt else [sys.stdin.read()]
  if args.stream and (len(prompts) > 1 or args.json or args.compare):
    raise ValueError("--stream: found with several prompts, --json or --compare, expected one "
                     "prompt alone")
  if args.compare and args.draft_model == "none":
    raise ValueError("--compare: found with --draft-model none, expected a drafter to compare")
  model = DSpark(args.model, None if args.draft_model == "none" else args.draft_model,
                 max_draft_len=args.max_draft_len,
                 confidence_threshold=args.confidence_threshold, accept_rule=args.accept_rule,
                 enable_thinking=False if args.no_thinking else None, dtype=args.dtype)
  if args.policy:
    if args.confidence_threshold:
      raise ValueError("--confidence-threshold: found with --policy, expected one of them")
    model = model.with_policy(POLICIES[args.policy](max_draft=args.max_draft_len))
  options = dict(max_new_tokens=args.max_new_tokens, max_length=args.max_length,
                 temperature=args.temperature, top_k=args.top_k, top_p=args.top_p,
                 min_p=args.min_p, seed=args.seed, is_raw=args.raw)
  if args.stream:
    for piece in model.stream(prompts[0], **options):
      print(piece, end="", flush=True)
    print()
    return
  if args.compare:  # compilation is no part of the speed
    model.warm_up(prompts, **options)
    model.warm_up(prompts, is_speculative=False, **options)
  results = model.generate(prompts, **options)
  plain = model.generate(prompts, is_speculative=False, **options) if args.compare else None
  for i, (prompt, result) in enumerate(zip(prompts, results)):
    if args.json:
      print(json.dumps({"prompt": prompt, **dataclasses.asdict(result)}))
      continue
    if len(prompts) > 1:
      print(f"--- prompt {i}")
    print(result.text)
    print(f"[{describe(result)}]", file=sys.stderr)
  if plain is not None:
    report(results, plain, is_greedy=args.temperature == 0)


def describe(result: Generation) -> str:
  return (f"{len(result.tokens)} tokens, {result.finish_reason}, {result.num_rounds} rounds, "
          f"tau {result.accepted_len:.2f}")


def report(results: list[Generation], plain: list[Generation], *, is_greedy: bool) -> None:
  """Prints the speed of both ways, and whether greedy tokens are the same."""
  def speed(rs):
    return sum(len(r.tokens) for r in rs) / rs[0].seconds
  print(f"plain {speed(plain):.1f} tok/s, DSpark {speed(results):.1f} tok/s, "
        f"{speed(results) / speed(plain):.2f}x", file=sys.stderr)
  if is_greedy:
    same = sum(a.tokens == b.tokens for a, b in zip(results, plain))
    print(f"greedy tokens identical for {same} of {len(results)} prompts", file=sys.stderr)


if __name__ == "__main__":
  sys.exit(main())
