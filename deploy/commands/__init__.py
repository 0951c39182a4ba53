"""One file per subcommand of `calib8`: arguments and printing, no logic."""
