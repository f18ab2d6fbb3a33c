"""Stage I: the flow between embeddings and a Gaussian, and the report that says how Gaussian the result is."""
