"""Meshes, placements, FSDP and gradients: how one model lies on many ranks."""
