"""solver_plugins"""
