"""What "exact" buys: every rule against the true flow of its differential equation."""
