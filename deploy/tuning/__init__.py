"""What stays float and which search finds which range: by error and by time, for each target."""
