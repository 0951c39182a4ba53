"""`python -m calib8`: the command line."""

from deploy.cli import main

main()
