// The time of one inference, in trtexec's metrics; the same JSON as deploy/metrics/latency.py.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "calib8/export.hpp"

CALIB8_EXPORT_BEGIN
namespace calib8 {

// One metric over all measured iterations, in ms (cv in percent).
struct Timing {
  double min = 0;
  double max = 0;
  double mean = 0;
  double median = 0;
  double p50 = 0;
  double p90 = 0;
  double p95 = 0;
  double p99 = 0;
  double cv_percent = 0;

  // Throws ConfigError: there is no sample.
  static Timing of(std::vector<double> samples_ms);
};

// A percentile of ascending samples as in trtexec: the floor((1 - p) * n) slowest are left out.
// Throws ConfigError: no sample, or a percent above 100.
double percentile(const std::vector<double>& ordered_ms, std::size_t percent);

// One inference on the device, in ms; trtexec's latency is h2d + compute + d2h.
struct DeviceTimes {
  double h2d_ms = 0;
  double compute_ms = 0;
  double d2h_ms = 0;
  double enqueue_ms = 0;
  double latency_ms() const { return h2d_ms + compute_ms + d2h_ms; }
};

struct Latency {
  std::size_t queries = 0;  // measured iterations (warm-up not counted)
  std::size_t warmup_queries = 0;
  double total_host_walltime_s = 0;
  double throughput_qps = 0;
  Timing latency;  // h2d + compute + d2h
  Timing host;     // by the host's clock
  Timing enqueue;
  Timing h2d;
  Timing gpu_compute;
  Timing d2h;
  std::vector<std::string> warnings;

  // Throws ConfigError: there is no sample.
  static Latency of(const std::vector<double>& host_ms, const std::vector<DeviceTimes>& device,
                    std::size_t warmup_queries);
  std::string to_json() const;
};

}  // namespace calib8
CALIB8_EXPORT_END
