"""An LLM as judge [Paper, Appendix D]: questions, answers and their cache, scores, and the tables made of them."""
