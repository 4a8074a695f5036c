"""How fast an engine is, beside llama.cpp itself."""
