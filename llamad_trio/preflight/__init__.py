"""Whether llama.cpp as it was compiled runs on this machine, found out before it is trusted."""
