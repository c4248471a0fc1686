"""The command line: one command per file. It talks to the framework and never to a backend."""
