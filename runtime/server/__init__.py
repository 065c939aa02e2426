"""The HTTP server: a front end that speaks JSON and one engine process that speaks token ids."""
