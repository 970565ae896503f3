"""The memory planner behind `csa2 plan`: what a model's cache takes, and what of it fits."""
