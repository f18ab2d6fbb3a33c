"""Sharing models: released folders, their manifest and card, and the Hugging Face hub."""
