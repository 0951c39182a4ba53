"""What stays float and which search finds which range: by error and by time, for each target.

`tune` plans one target, from its plan file or by a search (`search`, on trial models of `probe`,
prices and timing); `plan_file` reads and writes the plan; `repairs` changes the float model's
constants where that helps. Rooms above (report, pipeline, analysis) import it. No module
knows a target by name: all go through `deploy.targets.base.Target`.
"""

ROUNDING = "adaround"
REPAIRS = (ROUNDING, "none")  # of the float model's weights
PREFERENCES = ("speed", "accuracy", "size")
THIS_CPU = "this"
# CPUs that may run the engine: this one, an unknown one, and those of `deploy.tuning.prices.CPUS`
CPU_NAMES = (THIS_CPU, "any", "vnni", "avx2", "arm")
