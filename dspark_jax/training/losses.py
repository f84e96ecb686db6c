"""The training loss (arXiv 2607.05147, section 3.3) as sums over drafts, and what is logged.

Everything is a SUM beside the sum of its weights. Who adds up micro-batches and devices divides
once, by the global weight: a mean of means weighs tokens by how few share their micro-batch.

Options beside the paper's CE + TV, all of them off by default:
- KL(target || draft), a soft CE, dense where TV's gradient vanishes (a draft law far from the
  target's) and CE sees one label.
- LK (arXiv 2602.23881): with a = acceptance, 'alpha' is -log a and 'lambda' is
  s KL + (1 - s)(1 - a), s = exp(-lk_eta a) without gradient; 3 is the paper's lk_eta
  (vllm-project/speculators, pull requests 657 and 673, and the user guide's loss functions). Here
  s belongs to each draft, as there; some have one s a draft position, of the mean acceptance.
- D-PACE (arXiv 2605.18810): position weights from what the drafter itself gives the labels. With
  q the probability of a label and c = `dpace_smoothing`, P_m = prod_{i <= m} ((1 - c) q_i + c), and
  draft j weighs w_j = sum_{m >= j} P_m, without gradient (the authors' README; 0.5 is their c).
"""

import dataclasses

import flax.struct
import jax
import jax.numpy as jnp

from dspark_jax.training.anchors import Blocks
from pallas_kernels import distillation_loss

WEIGHT_FLOOR = 1e-6  # added to the sum of weights, as the public reference does


@dataclasses.dataclass(frozen=True)
class LossConfig:
  """Weights of the terms; (CE, TV, confidence) = (1, 0, 0) is DFlash.

  Attributes:
    loss_decay: drafts; label k has weight exp(-(k - 1) / loss_decay).
    chunk: most tokens whose logits are in memory at a time.
    lk_form: 'lambda' or 'alpha'.
    weighting: 'decay', or 'dpace' for CE, TV, KL and LK. The confidence term keeps the decay; all
      of the loss is then per block, not per weighted draft, as D-PACE's author wants it
      (sgl-project/SpecForge, issue 828): the sum of its weights is what it rewards. It costs 5
      products with the LM head in place of 3, since weights have to be known beforehand.
  """
  ce_weight: float = 0.1
  tv_weight: float = 0.9
  confidence_weight: float = 1.0
  loss_decay: float = 4.0
  chunk: int = 256
  kl_weight: float = 0.0
  lk_weight: float = 0.0
  lk_form: str = "lambda"
  lk_eta: float = 3.0
  weighting: str = "decay"
  dpace_smoothing: float = 0.5

  def __post_init__(self):
    for name in ("ce_weight", "tv_weight", "confidence_weight", "kl_weight", "lk_weight", "lk_eta"):
      if getattr(self, name) < 0:
        raise ValueError(f"{name}: found {getattr(self, name)}, expected a number >= 0")
    if not self.loss_decay > 0:
      raise ValueError(f"loss_decay: found {self.loss_decay}, expected a positive number")
    for name, known in (("lk_form", ("lambda", "alpha")), ("weighting", ("decay", "dpace"))):
      if getattr(self, name) not in known:
        raise ValueError(f"{name}: found {getattr(self, name)!r}, expected one of {known}")
    if not 0 < self.dpace_smoothing <= 1:
      raise ValueError(f"dpace_smoothing: found {self.dpace_smoothing}, expected a number within "
                       "(0, 1]: at 0 one label that the drafter excludes ends its block")


@flax.struct.dataclass
class LossSums:
  """Sums over the drafts of a micro-batch; adding two of them gives those of the joined batch.

  Attributes:
    ce, tv, confidence: weighted sums of the terms.
    weight: what the sums are to be divided by: the position weights over the eval mask, or the
      number of kept blocks with D-PACE.
    accept_G, count_G: sum of the accept rate labels and number of drafts, by draft position.
    tau, num_blocks: sum of 1 + sum_k prod_{i <= k} accept_i, and number of kept blocks.
    num_outside: labels outside the draft vocabulary.
  """
  ce: jax.Array
  tv: jax.Array
  confidence: jax.Array
  weight: jax.Array
  accept_G: jax.Array
  count_G: jax.Array
  tau: jax.Array
  num_blocks: jax.Array
  num_outside: jax.Array


def position_weights(proposal_len: int, loss_decay: float) -> jax.Array:
  """Returns exp(-(k - 1) / loss_decay) for k = 1..G, float32 [G]."""
  return jnp.exp(-jnp.arange(proposal_len, dtype=jnp.float32) / loss_decay)


def dpace_weights(label_p_xG: jax.Array, mask_xG: jax.Array, smoothing: float) -> jax.Array:
  """Returns D-PACE's weight of each draft, float32 [..., G], without gradient.

  A draft counts while all before it in its block do; label_p_xG are the draft law's probabilities
  of the labels.
  """
  smooth_xG = (1.0 - smoothing) * label_p_xG + smoothing
  reach_xG = jnp.cumprod(jnp.where(mask_xG, smooth_xG, 0.0), axis=-1)
  return jax.lax.stop_gradient(jnp.flip(jnp.cumsum(jnp.flip(reach_xG, -1), axis=-1), -1))


def to_draft_index(tokens_x: jax.Array, draft_ids_Vd: jax.Array | None) -> jax.Array:
  """Maps target ids to indices of the draft vocabulary (sorted ids); -1 = outside it."""
  if draft_ids_Vd is None:
    return tokens_x
  index_x = jnp.minimum(jnp.searchsorted(draft_ids_Vd, tokens_x), draft_ids_Vd.shape[0] - 1)
  return jnp.where(draft_ids_Vd[index_x] == tokens_x, index_x, -1).astype(jnp.int32)


def binary_cross_entropy(logits_x: jax.Array, labels_x: jax.Array) -> jax.Array:
  """-y log s(z) - (1 - y) log(1 - s(z)), finite for every finite logit."""
  return (jnp.maximum(logits_x, 0.0) - logits_x * labels_x
          + jnp.log1p(jnp.exp(-jnp.abs(logits_x))))


def sum_losses(hidden_BxAxGxD: jax.Array, bias_in_BxAxGxR: jax.Array, w2_VdxR: jax.Array,
               confidence_logits_BxAxG: jax.Array | None, *, target_hidden_BxTxD: jax.Array,
               lm_head_VdxD: jax.Array, blocks: Blocks, config: LossConfig,
               draft_ids_Vd: jax.Array | None = None, target_lse_BxT: jax.Array | None = None,
               copy_token_BxAxG: jax.Array | None = None,
               copy_bias_BxAxG: jax.Array | None = None) -> tuple[jax.Array, LossSums]:
  """Returns (weighted sum of all terms, LossSums); gradients flow from the first alone.

  Args:
    hidden_BxAxGxD: final-normed hidden states of the drafts.
    bias_in_BxAxGxR, w2_VdxR: sequential head; R = 0 without one.
    confidence_logits_BxAxG: None without a confidence head.
    target_hidden_BxTxD: FINAL-NORMED hidden states of the target, one a position.
    lm_head_VdxD: frozen; the rows of the draft vocabulary.
    copy_token_BxAxG, copy_bias_BxAxG: target ids and biases of the copy head, -1 = no copy.
    draft_ids_Vd, target_lse_BxT: both for a reduced draft vocabulary, neither for the whole.
  """
  B, A, G, D = hidden_BxAxGxD.shape
  if (draft_ids_Vd is None) != (target_lse_BxT is None):
    raise ValueError("target_lse_BxT: expected with a reduced draft vocabulary, and only then")
  look_up = jax.vmap(lambda rows, at: rows[at])
  flat = lambda a_BxAxGx: a_BxAxGx.reshape(B * A * G, *a_BxAxGx.shape[3:])
  mask_BxAxG = blocks.eval_mask_BxAxG
  decay_BxAxG = mask_BxAxG * position_weights(G, config.loss_decay)[None, None, :]
  index_BxAxG = to_draft_index(blocks.labels_BxAxG, draft_ids_Vd)
  lse_N = None
  if target_lse_BxT is not None:
    lse_N = flat(look_up(target_lse_BxT, blocks.law_positions_BxAxG))
  copy = {}
  if copy_token_BxAxG is not None:
    copy_index_BxAxG = jnp.where(copy_token_BxAxG < 0, -1,
                                 to_draft_index(copy_token_BxAxG, draft_ids_Vd))
    copy = dict(copy_index_N=flat(copy_index_BxAxG), copy_bias_N=flat(copy_bias_BxAxG))

  def compare(head_inputs, weights_BxAxG):
    hidden_BxAxGxD, bias_in_BxAxGxR, w2_VdxR, copy = head_inputs
    weigh = lambda weight: flat(weight * weights_BxAxG)
    return distillation_loss.weighted_distillation_loss(
        flat(hidden_BxAxGxD), flat(look_up(target_hidden_BxTxD, blocks.law_positions_BxAxG)),
        lm_head_VdxD, flat(bias_in_BxAxGxR), w2_VdxR, flat(index_BxAxG), weigh(config.ce_weight),
        weigh(config.tv_weight), keep_N=flat(mask_BxAxG), target_lse_N=lse_N, chunk=config.chunk,
        kl_weights_N=weigh(config.kl_weight) if config.kl_weight else None,
        lk_weights_N=weigh(config.lk_weight) if config.lk_weight else None,
        lk_eta=config.lk_eta if config.lk_form == "lambda" else None, **copy)

  head_inputs = (hidden_BxAxGxD, bias_in_BxAxGxR, w2_VdxR, copy)
  num_blocks = blocks.keep_BxA.sum().astype(jnp.float32)
  weights_BxAxG, weight = decay_BxAxG, jnp.sum(decay_BxAxG)
  if config.weighting == "dpace":
    ce_BxAxG = compare(jax.lax.stop_gradient(head_inputs), decay_BxAxG)[1][0].reshape(B, A, G)
    label_p_BxAxG = jnp.where(index_BxAxG >= 0, jnp.exp(-ce_BxAxG), 0.0)
    weights_BxAxG = dpace_weights(label_p_BxAxG, mask_BxAxG, config.dpace_smoothing)
    weight = num_blocks
  loss, terms = compare(head_inputs, weights_BxAxG)
  ce_BxAxG, tv_BxAxG, accept_BxAxG = (term.reshape(B, A, G) for term in terms)
  confidence = jnp.float32(0.0)
  if confidence_logits_BxAxG is not None:
    label_BxAxG = jax.lax.stop_gradient(jnp.where(mask_BxAxG, accept_BxAxG, 0.0))
    bce_BxAxG = binary_cross_entropy(confidence_logits_BxAxG, label_BxAxG)
    confidence = jnp.sum(decay_BxAxG * bce_BxAxG)
    loss = loss + config.confidence_weight * confidence
  survival_BxAxG = jnp.cumprod(jnp.where(mask_BxAxG, accept_BxAxG, 0.0), axis=-1)
  sums = LossSums(
      ce=jnp.sum(weights_BxAxG * ce_BxAxG), tv=jnp.sum(weights_BxAxG * tv_BxAxG),
      confidence=confidence, weight=weight,
      accept_G=jnp.sum(jnp.where(mask_BxAxG, accept_BxAxG, 0.0), axis=(0, 1)),
      count_G=jnp.sum(mask_BxAxG, axis=(0, 1)).astype(jnp.float32),
      tau=num_blocks + jnp.sum(survival_BxAxG), num_blocks=num_blocks,
      num_outside=jnp.sum(mask_BxAxG & (index_BxAxG < 0)).astype(jnp.float32))
  return loss, jax.lax.stop_gradient(sums)


def summarize(loss_sum: jax.Array, sums: LossSums) -> dict[str, jax.Array]:
  """Turns (added-up) sums into the figures to log: means over the global batch, by its weight.

  `tau_prob` is the expected accepted length (bonus included) under the drafter's own laws;
  `accept_rate_{k}` is that of draft k = 1..G; `outside` the share of labels that the draft
  vocabulary lacks. Without a single draft all are 0.
  """
  weight = sums.weight + WEIGHT_FLOOR
  metrics = {
      "loss": loss_sum / weight, "loss_ce": sums.ce / weight, "loss_tv": sums.tv / weight,
      "loss_confidence": sums.confidence / weight,
      "tau_prob": sums.tau / jnp.maximum(sums.num_blocks, 1.0),
      "outside": sums.num_outside / jnp.maximum(sums.count_G.sum(), 1.0),
      "num_blocks": sums.num_blocks, "num_drafts": sums.count_G.sum()}
  accept_rate_G = sums.accept_G / jnp.maximum(sums.count_G, 1.0)
  for k in range(accept_rate_G.shape[0]):
    metrics[f"accept_rate_{k + 1}"] = accept_rate_G[k]
  return metrics
