"""Answers that follow a JSON schema, a regular expression, a list of texts or a grammar."""
