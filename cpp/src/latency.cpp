#include "calib8/latency.hpp"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "calib8/errors.hpp"
#include "json_text.hpp"
#include "pairwise.hpp"

namespace calib8 {
namespace {

using json_text::Json;
constexpr double kUnstablePercent = 2.5;  // trtexec's limit for the coefficient of variance
constexpr std::size_t kMinIterations =
    20;  // iterations under which even the 95th percentile is the slowest of them

std::vector<double> stage_times(const std::vector<DeviceTimes>& device,
                                double DeviceTimes::*member) {
  std::vector<double> samples;
  for (const DeviceTimes& times : device) samples.push_back(times.*member);
  return samples;
}

// The warnings of trtexec, on the same conditions, and one of too short a time.
std::vector<std::string> make_warnings(const Latency& latency) {
  std::vector<std::string> warnings;
  if (latency.queries < kMinIterations) {
    warnings.emplace_back("measured over only " + std::to_string(latency.queries) + " iteration" +
                          (latency.queries == 1 ? "" : "s") +
                          ", so p95 and p99 are the slowest one; measure for longer");
  }
  if (latency.latency.cv_percent > kUnstablePercent) {
    warnings.emplace_back("unstable latency, its coefficient of variance is over 2.5 %");
  }
  if (latency.enqueue.median > 0.8 * latency.gpu_compute.median) {
    warnings.emplace_back(
        "the host's enqueue time is over 0.8 of the compute time: a CUDA graph may help");
  }
  if (latency.h2d.median >= latency.gpu_compute.median) {
    warnings.emplace_back("copying (h2d) takes as long as computing or longer");
  }
  if (latency.d2h.median >= latency.gpu_compute.median) {
    warnings.emplace_back("copying (d2h) takes as long as computing or longer");
  }
  return warnings;
}

Json timing_json(const Timing& timing) {
  return {{"min", timing.min},       {"max", timing.max}, {"mean", timing.mean},
          {"median", timing.median}, {"p50", timing.p50}, {"p90", timing.p90},
          {"p95", timing.p95},       {"p99", timing.p99}, {"cv_percent", timing.cv_percent}};
}

}  // namespace

double percentile(const std::vector<double>& ordered_ms, std::size_t percent) {
  const std::size_t n = ordered_ms.size();
  if (n == 0 || percent > 100) {
    throw ConfigError("a percentile is of one sample at the least and of 0 to 100, got " +
                      std::to_string(n) + " samples and " + std::to_string(percent));
  }
  const std::size_t left_out = (100 - percent) * n / 100;
  return ordered_ms[left_out + 1 > n ? 0 : n - 1 - left_out];
}

Timing Timing::of(std::vector<double> samples_ms) {
  if (samples_ms.empty()) {
    throw ConfigError("a timing needs one sample at the least, got none; measure longer");
  }
  std::sort(samples_ms.begin(), samples_ms.end());
  const std::size_t n = samples_ms.size();
  const auto count = static_cast<double>(n);
  Timing timing;
  timing.min = samples_ms.front();
  timing.max = samples_ms.back();
  timing.mean = pairwise::sum(samples_ms) / count;
  timing.median = (samples_ms[(n - 1) / 2] + samples_ms[n / 2]) / 2;
  timing.p50 = percentile(samples_ms, 50);
  timing.p90 = percentile(samples_ms, 90);
  timing.p95 = percentile(samples_ms, 95);
  timing.p99 = percentile(samples_ms, 99);
  std::vector<double> squares;
  for (const double x : samples_ms) squares.push_back((x - timing.mean) * (x - timing.mean));
  const double deviation = std::sqrt(pairwise::sum(squares) / count);
  timing.cv_percent = timing.mean > 0 ? 100 * deviation / timing.mean : 0.0;
  return timing;
}

Latency Latency::of(const std::vector<double>& host_ms, const std::vector<DeviceTimes>& device,
                    std::size_t warmup_queries) {
  std::vector<double> samples;
  for (const DeviceTimes& times : device) samples.push_back(times.latency_ms());
  Latency result;
  result.latency = Timing::of(samples);
  result.host = Timing::of(host_ms);
  result.enqueue = Timing::of(stage_times(device, &DeviceTimes::enqueue_ms));
  result.h2d = Timing::of(stage_times(device, &DeviceTimes::h2d_ms));
  result.gpu_compute = Timing::of(stage_times(device, &DeviceTimes::compute_ms));
  result.d2h = Timing::of(stage_times(device, &DeviceTimes::d2h_ms));
  result.queries = samples.size();
  result.warmup_queries = warmup_queries;
  result.total_host_walltime_s = std::accumulate(host_ms.begin(), host_ms.end(), 0.0) / 1e3;
  result.throughput_qps = static_cast<double>(result.queries) / result.total_host_walltime_s;
  result.warnings = make_warnings(result);
  return result;
}

std::string Latency::to_json() const {
  return Json{{"queries", queries},
              {"warmup_queries", warmup_queries},
              {"total_host_walltime_s", total_host_walltime_s},
              {"throughput_qps", throughput_qps},
              {"latency", timing_json(latency)},
              {"host", timing_json(host)},
              {"enqueue", timing_json(enqueue)},
              {"h2d", timing_json(h2d)},
              {"gpu_compute", timing_json(gpu_compute)},
              {"d2h", timing_json(d2h)},
              {"warnings", warnings}}
      .dump();
}

}  // namespace calib8
