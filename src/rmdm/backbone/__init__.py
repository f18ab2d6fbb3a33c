"""The transformer, and the operations on its hidden states."""
