"""Figures about trained models."""
