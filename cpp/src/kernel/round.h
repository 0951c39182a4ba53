/* Weights rounded up or down so that a layer's output errs least: coordinate descent over rows.
 *
 * The computation and its order are defined by calibrators/rounding.py; the results are equal to the
 * last bit. Nothing is allocated and nothing is global. */
#ifndef CALIB8_KERNEL_ROUND_H
#define CALIB8_KERNEL_ROUND_H

#include <stddef.h>
#include <stdint.h>

/* Goes through every weight of every row, `sweeps` times at most.
 * `low`, `high`: [rows, columns] both values that each weight may take. `integers`: the current values.
 * `slope`: (q - w) (H + damp), updated with them. `products`: H, [columns, columns].
 * `fixed`: not 0 where a weight must not move. Returns the number of moves. */
int64_t calib8_round(size_t rows, size_t columns, int sweeps, const double* low, const double* high,
                     double* integers, double* slope, const double* products, double damp,
                     const uint8_t* fixed);

#endif
