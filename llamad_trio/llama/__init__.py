"""The only door to llama.cpp.  Blocking calls, no Trio; the actors decide the thread."""
