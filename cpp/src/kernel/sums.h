/* The number and the sum of the values in each bin of a histogram, for AMCT's IFMR search.
 *
 * The bins are defined by calibrators/amct/ifmr.py; the results are equal to its own. Nothing is
 * allocated and nothing is global. */
#ifndef CALIB8_KERNEL_SUMS_H
#define CALIB8_KERNEL_SUMS_H

#include <stddef.h>
#include <stdint.h>

/* Adds `count` values to the bins trunc(x * bins_per_unit), -side to side, which hold all of them.
 * `counts`, `sums`: [2 * side + 1]. The sum of bin 0 stays 0. */
void calib8_count_and_sum(size_t count, const float* values, float bins_per_unit, size_t side,
                          int64_t* counts, double* sums);

#endif
