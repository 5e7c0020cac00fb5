"""The commands of ``efla``, one module each, named like the command."""
