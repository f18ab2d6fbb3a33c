"""`rmdm serve`: a page to watch text appear, and an HTTP API that other programs already speak."""
