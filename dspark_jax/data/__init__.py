"""Prompts, chat templates, regenerated answers and the training input pipeline."""
