"""How many drafts are worth verifying."""
