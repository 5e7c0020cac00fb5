"""The MAD synthetic benchmark: six token-manipulation tasks, one small model per update rule."""
