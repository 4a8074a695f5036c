"""How fast an engine is, beside llama.cpp itself."""

TEXT = "One, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, "
"""What goes on for long, whatever the model."""
