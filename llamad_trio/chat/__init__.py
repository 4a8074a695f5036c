"""Chat templates: messages to prompt text.  Pure; knows neither Trio nor llama.cpp."""
