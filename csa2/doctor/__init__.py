"""`csa2 doctor`: readings of a running server in, likely causes and what to do about them out.

`collect` asks the server, the `*_rules` modules turn readings into findings without asking anybody, `prompts` compares
prompts. Imports neither SGLang nor torch.
"""
