"""Layers that serving adds to a loaded model: packed and fused linears."""
