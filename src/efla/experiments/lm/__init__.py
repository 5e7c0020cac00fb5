"""The paper's language-model table at the scale of a CPU: six mixers and two controls, the same bytes in the same order."""
