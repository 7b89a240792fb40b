"""OpenVINO on a CPU, with a paged cache."""
