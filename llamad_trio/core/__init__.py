"""Every decision, without I/O: no Trio, no llama.cpp, no clocks, no threads."""
