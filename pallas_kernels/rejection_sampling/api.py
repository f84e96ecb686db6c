"""Speculative rejection sampling: the one public function of the family."""

import jax
import jax.numpy as jnp

from pallas_kernels.dispatch import dispatch
from pallas_kernels.rejection_sampling.kernel_tpu import rejection_sampling_tpu
from pallas_kernels.rejection_sampling.reference import rejection_sampling_reference


def rejection_sampling(
  target_logits_BxWxV: jax.Array,
  draft_logits_BxGxD: jax.Array,
  draft_tokens_BxG: jax.Array,
  *,
  verify_lens_B: jax.Array,
  coins_BxG: jax.Array,
  noise_words_BxWx2: jax.Array,
  draft_ids: jax.Array | None = None,
  implementation: str = "auto",
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Accepts the longest exact prefix of the drafts and draws one more token.

  With p_k, q_k the target's and the drafter's law of row k: draft x_k is accepted iff it and all
  before it satisfy u_k < min(1, p_k(x_k) / q_k(x_k)), strictly (a ratio of 1 accepts always, p = 0
  never; a draft with q = 0, which no drafter can have drawn, is rejected). The first rejected row n
  draws its token from max(p_n - q_n, 0), normalised, or from p_n when that mass is <= 1e-8; when
  all verified drafts are accepted the token is drawn from p of row n = verify length. Tokens then
  follow p exactly, if coins and noise are independent of the drafts and of each other.
  Source: DSpark paper section 2.1; Leviathan et al. 2023.

  Args:
    target_logits_BxWxV: float32 law logits (after temperature and filters, unnormalised, -inf
      allowed); row k is the law of the token that draft k proposes. Row verify_lens is needed:
      W = G + 1, or verify_lens < W (a larger one is cut to W - 1).
    draft_logits_BxGxD: float32 law logits the drafts were really drawn from; D is the size of the
      draft vocabulary, V without draft_ids.
    draft_tokens_BxG: int32 target ids.
    verify_lens_B: int32, drafts to consider, 0..G.
    coins_BxG: float32 uniforms in [0, 1).
    noise_words_BxWx2: uint32, row n's words draw the token after n accepted drafts.
    draft_ids: int32 sorted target ids of the draft vocabulary's columns, None = all V.
    implementation: "auto" (a kernel on TPU), "reference", or "pallas" (on GPU too); see
      `pallas_kernels.dispatch`.

  Returns:
    num_accepted_B int32 in 0..verify_lens, next_token_B int32 in [0, V), and is_valid_B bool: False
    when a row that decided something is no law (a NaN, +inf, or nothing finite); `next_token` is
    then 0 and must not be used.

  Raises:
    ValueError: shapes do not fit together, or logits are not float32.
  """
  _check_shapes(
    target_logits_BxWxV,
    draft_logits_BxGxD,
    draft_tokens_BxG,
    verify_lens_B,
    coins_BxG,
    noise_words_BxWx2,
    draft_ids,
  )
  return dispatch(
    implementation,
    target_logits_BxWxV,
    draft_logits_BxGxD,
    draft_tokens_BxG,
    verify_lens_B,
    coins_BxG,
    noise_words_BxWx2,
    draft_ids,
    reference=rejection_sampling_reference,
    kernels={"tpu": rejection_sampling_tpu},
    on_request={"cuda": _run_gpu},
  )


def _run_gpu(*args):
  # Imported when asked for: Pallas will drop Triton one day, and nothing else may break then.
  from pallas_kernels.rejection_sampling.kernel_gpu import rejection_sampling_gpu

  return rejection_sampling_gpu(*args)


def _check_shapes(target_logits, draft_logits, tokens, verify_lens, coins, words, draft_ids):
  for name, logits in (("target_logits", target_logits), ("draft_logits", draft_logits)):
    if logits.ndim != 3 or logits.dtype != jnp.float32:
      raise ValueError(f"{name}: found {logits.dtype}{logits.shape}, expected float32 of rank 3")
  (batch, num_rows, vocab), num_drafts = target_logits.shape, draft_logits.shape[1]
  draft_vocab = vocab if draft_ids is None else draft_ids.shape[0]
  for name, array, expected in (
    ("draft_logits", draft_logits, (batch, num_drafts, draft_vocab)),
    ("draft_tokens", tokens, (batch, num_drafts)),
    ("verify_lens", verify_lens, (batch,)),
    ("coins", coins, (batch, num_drafts)),
    ("noise_words", words, (batch, num_rows, 2)),
  ):
    if array.shape != expected:
      raise ValueError(f"{name}: found shape {array.shape}, expected {expected}")
