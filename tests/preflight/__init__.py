"""The preflight: llama.cpp is tried before it is trusted."""
