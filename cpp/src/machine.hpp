// What this machine has; deploy/machine.py.
#pragma once

#include <algorithm>
#include <thread>

#ifdef __linux__
#include <sched.h>
#endif

namespace calib8 {

// Logical cores that this thread may use: its affinity where the system has one.
inline int usable_cores() {
#ifdef __linux__
  cpu_set_t cores;
  if (::sched_getaffinity(0, sizeof cores, &cores) == 0) return CPU_COUNT(&cores);
#endif
  return std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
}

// Threads where the user names none: every core, but no more than 4.
inline int default_threads() { return std::min(4, usable_cores()); }

}  // namespace calib8
