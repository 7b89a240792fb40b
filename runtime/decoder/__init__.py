"""One block of decoding: draft, score, accept, commit."""
