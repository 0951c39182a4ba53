/* Rows are handled one at a time: the slopes of a row stay in the core's first cache, and only a weight
 * that moves reads its row of H. Rows are independent, so their order changes nothing. */
#include "round.h"

static void add_scaled(double* restrict slope, const double* restrict products, double factor,
                       size_t columns) {
  for (size_t column = 0; column < columns; column++) {
    slope[column] += factor * products[column];
  }
}

static int64_t sweep(size_t columns, const double* low, const double* high, double* integers,
                     double* slope, const double* products, double damp, const uint8_t* fixed) {
  int64_t move_count = 0;
  for (size_t k = 0; k < columns; k++) {
    double alternative = low[k] + high[k] - integers[k];
    double step = alternative - integers[k];
    double change = 2 * step * slope[k] + step * step * (products[k * columns + k] + damp);
    if (change < 0 && !fixed[k]) {
      integers[k] = alternative;
      add_scaled(slope, products + k * columns, step, columns);
      slope[k] += step * damp;
      move_count++;
    }
  }
  return move_count;
}

int64_t calib8_round(size_t rows, size_t columns, int sweeps, const double* low, const double* high,
                     double* integers, double* slope, const double* products, double damp,
                     const uint8_t* fixed) {
  int64_t total_moves = 0;
  for (size_t row = 0; row < rows; row++) {
    size_t offset = row * columns;
    for (int sweep_index = 0; sweep_index < sweeps; sweep_index++) {
      int64_t move_count = sweep(columns, low + offset, high + offset, integers + offset,
                                 slope + offset, products, damp, fixed + offset);
      total_moves += move_count;
      if (!move_count) {
        break;
      }
    }
  }
  return total_moves;
}
