"""Solved small tasks: each function is a task, its docstring what is asked, its body the solution."""
