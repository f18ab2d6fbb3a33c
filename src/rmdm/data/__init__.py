"""From text to token rows: sources, tokenizers, shards, and the order in which rows are taken."""
