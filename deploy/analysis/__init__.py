"""What was built, looked at: benchmarks, comparisons of runtimes and of builds, explanations."""
