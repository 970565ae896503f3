"""Operators on compressed KV pages: no policy, no SGLang. Needs torch only."""
