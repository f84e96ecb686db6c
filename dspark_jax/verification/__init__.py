"""Verification: pack, verify, accept, commit."""
