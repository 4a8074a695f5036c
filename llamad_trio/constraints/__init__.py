"""What limits a reply: JSON schemas and grammars, checked, translated, compiled."""
