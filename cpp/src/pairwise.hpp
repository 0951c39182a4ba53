// Sums in numpy's order.
#pragma once

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

namespace calib8::pairwise {

// Pairwise summation in numpy's order, so that sums agree to the last bit: blocks of up to 128
// with eight accumulators, halved above.
inline double sum(const double* x, std::size_t n) {
  if (n < 8) return std::accumulate(x, x + n, -0.0);
  if (n > 128) {
    std::size_t half = n / 2;
    half -= half % 8;
    return sum(x, half) + sum(x + half, n - half);
  }
  double r[8];
  std::copy(x, x + 8, r);
  std::size_t k = 8;
  for (; k < n - n % 8; k += 8) {
    for (std::size_t lane = 0; lane < 8; ++lane) r[lane] += x[k + lane];
  }
  double sum = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
  for (; k < n; ++k) sum += x[k];
  return sum;
}

inline double sum(const std::vector<double>& x) { return sum(x.data(), x.size()); }

}  // namespace calib8::pairwise
