"""The sequential walk: drafts drawn one after another, each with a bias from the one before."""

from pallas_kernels.markov_sampling.api import markov_sampling
from pallas_kernels.markov_sampling.reference import Draws, pruned_markov_sampling, walk

__all__ = ["Draws", "markov_sampling", "pruned_markov_sampling", "walk"]
