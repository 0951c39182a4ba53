#include "sums.h"

void calib8_count_and_sum(size_t count, const float* values, float bins_per_unit, size_t side,
                          int64_t* counts, double* sums) {
  int64_t* counts_at_0 = counts + side;
  double* sums_at_0 = sums + side;
  for (size_t k = 0; k < count; k++) {
    ptrdiff_t bin = (ptrdiff_t)(values[k] * bins_per_unit);
    counts_at_0[bin]++;
    sums_at_0[bin] += values[k];
  }
  *sums_at_0 = 0.0;
}
