#include "sums.h"

enum { PARTS = 4 };

static inline void add(float value, float bins_per_unit, int64_t* counts_at_0, double* sums_at_0) {
  ptrdiff_t bin = (ptrdiff_t)(value * bins_per_unit);
  counts_at_0[bin]++;
  sums_at_0[bin] += value;
}

/* Neighbouring values are often nearly equal, and additions to one bin wait for each other. So the data
 * are split into four parts, whose values are added in turns; the sums are exact in any order. */
void calib8_count_and_sum(size_t count, const float* values, float bins_per_unit, size_t side,
                          int64_t* counts, double* sums) {
  int64_t* counts_at_0 = counts + side;
  double* sums_at_0 = sums + side;
  size_t part_size = count / PARTS;
  for (size_t k = 0; k < part_size; k++) {
    for (size_t part = 0; part < PARTS; part++) {
      add(values[part * part_size + k], bins_per_unit, counts_at_0, sums_at_0);
    }
  }
  for (size_t k = PARTS * part_size; k < count; k++) {
    add(values[k], bins_per_unit, counts_at_0, sums_at_0);
  }
  *sums_at_0 = 0.0;
}
