"""The command line, one file per subcommand. What takes long to import is imported when a command runs."""
