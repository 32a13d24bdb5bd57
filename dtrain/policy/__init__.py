"""A model on a mesh with its optimizer."""

from dtrain.policy.policy import Policy

__all__ = ["Policy"]
