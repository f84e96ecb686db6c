import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.metrics.logit_gap import measure_logit_gap
from dspark_jax.target.transformer import Transformer
from tests import tiny


def test_gap_of_the_two_best():
  params = jax.tree.map(jnp.asarray, tiny.make_target_params())
  tokens = [5, 9, 1]
  model = Transformer(tiny.CONFIG)

  @jax.jit
  def all_logits(tokens_BxT):
    out = model.apply({"params": params}, tokens_BxT)
    return model.apply({"params": params}, out.hidden_BxTxD, method=model.head)

  logits = np.asarray(all_logits(jnp.asarray([tokens])))[0, -1]
  first, second = np.argsort(-logits)[:2]
  best, gap = measure_logit_gap(tiny.CONFIG, params, tokens)
  assert best == [first, second]
  np.testing.assert_allclose(gap, logits[first] - logits[second], atol=1e-5)
  # Ids from the limit on are never emitted, so they are no rivals.
  best, _ = measure_logit_gap(tiny.CONFIG, params, tokens, vocab_limit=int(first))
  assert max(best) < first
