"""`python -m deploy` is `calib8`."""

from deploy.cli import main

main()
