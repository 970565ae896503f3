"""`csa2 top`: what a running server holds, in a terminal. Needs neither torch nor SGLang."""
