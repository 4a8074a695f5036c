"""Tool-call syntaxes: what each family of models writes, as text, as a grammar, and read again."""
