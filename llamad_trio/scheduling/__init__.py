"""Which request runs, what a step computes, which cells it has: pure decisions."""
