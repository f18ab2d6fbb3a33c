"""Pretrained encoders, pooling into groups, PCA whitening, and the embedding cache."""
