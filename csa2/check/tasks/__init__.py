"""Tasks whose answers are known: made from a seed, answered by an engine, scored by string match as RULER does."""
