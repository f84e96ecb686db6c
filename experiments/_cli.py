"""What the scripts share: a `--config` flag, and errors as one line."""

import contextlib
import sys
from typing import Callable

import ml_collections
from absl import app
from absl import flags
from absl import logging
from ml_collections import config_flags

from dspark_jax.host_memory import tune_malloc


def run(main: Callable[[ml_collections.ConfigDict], None], *, config: str) -> None:
  """Parses flags and calls `main` with the config; `config` is the default file.

  A misspelt field, an unknown flag and whatever `main` refuses end in one line on stderr and a
  non-zero exit status.
  """
  tune_malloc()
  with _as_one_line():  # the default is read, with the changes of the command line, right here
    flag = config_flags.DEFINE_config_file("config", config, "What to run; --config.FIELD=VALUE "
                                           "changes a field.", lock_config=True)
  flags.FLAGS.register_key_flag_for_module(sys.argv[0], flags.FLAGS["config"])  # shown by --help
  app.run(lambda argv: guard(main, flag.value), flags_parser=_parse)


def guard(main: Callable[[ml_collections.ConfigDict], None],
          config: ml_collections.ConfigDict) -> None:
  """Calls `main`; bad input leaves by SystemExit with one line."""
  logging.set_verbosity(logging.WARNING)  # orbax tells its every move
  try:
    main(config)
  except (ValueError, OSError) as e:
    sys.exit("error: " + " ".join(str(e).split()))


def _parse(argv: list[str]) -> list[str]:
  with _as_one_line():
    rest = app.parse_flags_with_usage(argv)
  if len(rest) > 1:
    sys.exit(f"error: unknown arguments: {' '.join(rest[1:])}")
  return rest


@contextlib.contextmanager
def _as_one_line():
  """Turns what ml_collections raises for a missing file or field into one line."""
  try:
    yield
  except (AttributeError, OSError, TypeError) as e:
    text = str(e).replace("\\n", " ").replace("\\'", "").replace("'", "")  # a quoted quotation
    sys.exit("error: --config: " + " ".join(text.split()))
