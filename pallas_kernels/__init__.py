"""Kernel families: arrays in, arrays out. Imports jax and numpy only, never dspark_jax."""
