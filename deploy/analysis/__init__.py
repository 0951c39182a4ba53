"""Analysis of models and builds: benchmarks, comparisons of models and of builds, explanations."""
